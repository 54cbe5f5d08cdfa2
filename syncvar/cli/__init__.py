"""The `syncvar` command."""
