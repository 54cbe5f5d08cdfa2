"""The last calls of this process and their totals, kept in memory and written on failure."""
