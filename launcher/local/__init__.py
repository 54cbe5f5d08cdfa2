"""Worker processes of this host."""
