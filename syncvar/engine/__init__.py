"""Calls under way: numbered, compared, recorded, waited for, and given up in order.

`group` numbers the calls of a group of ranks. A call is an `operation`: in shared memory (`shared_operation`), over links
(`executor`) or both (`hierarchical`). Whoever calls drives it; where that takes long the `engine` does, which hears the
launcher, knows deadlines and tells who waits for whom (`call_ledger`, `one_sided`, `flow`). A call that is repeated is
prepared once (`prepared_reductions`, `prepared_moves`): one guard, one number, one entry of the `recorder`. Messages between
two ranks have boxes of their own (`messages`, `at_once`).
"""
