"""Calls under way: numbered, compared, recorded, waited for, and given up in order.

`group` numbers the calls of a group of ranks, and its `planner` chooses their plans. A call is an `operation` that goes
step by step through its `stages`, in shared memory, over `links` or both; `work` is its handle where it was started and is
waited for later. Whoever calls drives it; where that takes long the `engine` does, one thread at a time.

What all parts of the engine share is its `core`: whether calls may begin, whose turn it is to drive, the launcher, and what
breaks a generation. `started` has the operations that run, `call_ledger` knows where each group stands, `flow` the credit of
the links, `one_sided` the questions outside all calls, `verdicts` what others say of this rank's calls. `queued` writes go
before every call that may wait, and `timeouts` says how long one may.

A call that is repeated is prepared once (`preparation`, `prepared_reductions`, `prepared_moves`): one guard, one number, one
entry of the flight recorder. Messages between two ranks have boxes of their own: `message_ends` are the two ends of a box,
`messages` the steps of a message that waits, `at_once` those that need not.
"""
