"""How a process comes into a job: it finds the others, proves that it belongs, and holds what it is in.

`context` is what a process is in. It gets there by `meeting` at rank 0 (through the launcher's `store`, a `directory` or
`cards` of files, or MPI), with the job's `secret`. `state` are the folders that a job keeps.
"""
