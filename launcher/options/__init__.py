"""Command line, variables, files and defaults of the launcher."""
