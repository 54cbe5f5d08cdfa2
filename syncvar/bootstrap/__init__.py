"""From environment variables to a connected process."""
