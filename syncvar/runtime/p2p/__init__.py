"""Messages from one rank to another."""
