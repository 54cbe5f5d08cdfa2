"""Calls under way: numbered, compared, recorded, waited for, and given up in order.

`group` numbers the calls of a group of ranks, and its `planner` chooses their plans (`prepared_plans`). A call is an
`operation` that goes step by step: in shared memory (`host_steps`), over links (`links`) or both (`hierarchical`). Whoever
calls drives it; where that takes long the `engine` does. `admission` is what a call looks at before it begins; `turns` says
who drives, and the `driver` advances the `started` calls, hears the launcher (`launcher_link`) and looks at clocks;
`call_ledger` knows where each group stands, `flow` the credit of the links, `one_sided` the questions outside all calls.
`failures` is what breaks a generation, `verdicts` what others say of this rank's calls.

A call that is repeated is prepared once (`preparation`, `prepared_reductions`, `prepared_moves`): one guard, one number, one
entry of the `recorder`. Messages between two ranks have boxes of their own (`message_ends`, `messages`, `at_once`).
"""
