"""Messages between workers and parameter servers."""
