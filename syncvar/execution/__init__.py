"""What a rank does in one call in shared memory, as data, and who does it.

Read `program` first: a **program** is a tuple of four instructions (copy, fold, publish, await) over named memories. It is
made ("lowered") and printed by pure functions, which the tests prove on symbols with every rank as far ahead as the waits allow:

* `lower_reduce`: all-reduces, small ones through slots, long ones through cells or where the arrays lie; several arrays as
  one vector;
* `lower_moves`: blocks that ranks take from each other;
* `lower_rounds`: the rounds of any plan of `syncvar.algorithms`.

`reductions`, `moves` and `rounds` make such calls: they find out where arrays lie (`addresses`) and which
program is for them. `running` compares in phase 0 what the ranks do, looks up the memories of a program and runs it: in C
(`syncvar._native`), or by `interpreter`, which is plain NumPy and what the C runner is compared with. `arithmetic` is
what becomes of the terms of ranks, by the ops of `syncvar.core.reduce_ops`, and `gil` keeps the interpreter's lock beside busy threads.
"""
