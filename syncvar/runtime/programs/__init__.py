"""Compile a collective in shared memory to four instructions, and run it."""
