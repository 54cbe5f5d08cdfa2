"""Number, start, wait for, record and abort calls."""
