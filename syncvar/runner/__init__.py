"""`sv.run`: start ranks from a program, on this host, on Ray or on Dask."""
