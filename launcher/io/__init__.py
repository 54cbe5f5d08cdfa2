"""Standard streams and signals of the launcher."""
