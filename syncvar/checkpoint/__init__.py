"""Save and restore variables and other objects, completely or not at all."""
