"""Compile calls into programs over shared memory, and run them in Python or in C."""
