"""Bytes in, events out: every message that crosses a process boundary, and every decision taken about it.

* `frame`: the header of a data frame.
* `control`: messages between a worker and the launcher, checked against a schema.
* `membership`, `arbiter`, `health`, `coordinator`: the launcher's decisions as pure machines (time is an argument).
* `servers`: where the servers of a job are, as the launcher tells it to whoever asks.
* `limits`: how long messages may be.
* `keys`: the secret of a job, and what is derived from it.
* `libraries`: tensors of other libraries as NumPy arrays on the same memory.
* `objects`, `moments`, `dtypes`: plain Python objects, dates and arrays as data; nothing is ever pickled.
* `arrays`, `structures`, `records`: arrays out of what a caller gives, the structure of nested ones, and what of them is told to others.

Nothing here opens a socket, starts a thread or reads a clock. NumPy is imported only when an array is met, and by the modules
of the last row, so that the launcher can use this room without it. The launcher's decisions and the keys are imported from
their own modules: workers do without them, and are there sooner.
"""
