"""The launcher: starts the ranks of a job, forwards what they write and reports the first failure.

It is installed as `syncvar_launcher`, imports no NumPy and is imported by nobody: syncvar never needs its launcher.
"""
