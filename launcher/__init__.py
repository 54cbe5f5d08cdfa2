"""The launcher: starts the ranks of a job, forwards what they write and reports the first failure.

It is installed as `syncvar_launcher` and imports no NumPy. The package syncvar never imports it.
"""
