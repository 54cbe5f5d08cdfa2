"""How workers and servers come together: the processes, links and shared memory under `syncvar.servers`, which decides."""
