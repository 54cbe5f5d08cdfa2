"""One shared-memory segment per host: allocator, group channels and message rings.

The launcher imports `segment_file` and `fd_passing`, so this file and these two load no NumPy.
"""
