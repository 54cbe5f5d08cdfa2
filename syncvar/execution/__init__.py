"""Calls in shared memory as programs: what they are, how they are made, and who runs them.

`program` says what a program is. `lower_reduce` makes those of long reductions.
"""
