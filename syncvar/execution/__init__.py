"""What a rank does in one call in shared memory, as data, and who does it.

Read `program` first: a **program** is a tuple of four instructions (copy, fold, publish, await) over named memories. It is
made ("lowered") by pure functions, which the tests prove on symbols with every rank as far ahead as the waits allow:

* `lower_reduce`: all-reduces, small ones through slots, long ones through cells or where the arrays lie; several arrays as
  one vector (`pieces`);
* `lower_moves`: blocks that ranks take from each other;
* `lower_rounds`: the rounds of any plan of `syncvar.plans`.

`show` prints them. `reductions`, `structures`, `moves` and `rounds` make such calls: they find where arrays lie, compare in
phase 0 (`phases`) what the ranks do, and let `running` run the program: in C (`syncvar.kernel`), or by `interpreter`, which
is plain NumPy and what the C runner is compared with. `kernels`, `float16` and `gil` are what combining needs.
"""
