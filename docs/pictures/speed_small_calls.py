"""Draw how fast small calls are beside their peers, for docs/benchmarks.md."""

import speed

CALLS = {
    "sv.all_reduce(x)": "all_reduce(x)",
    "sv.all_reduce(1.0)": "all_reduce(1.0), a number",
    "sv.all_reduce([x, y, z])": "all_reduce of three arrays",
    'sv.all_reduce({"loss": 1.0, "n": 2.0})': "all_reduce of a dict of numbers",
    "sv.all_reduce(x, async_op=True).wait()": "all_reduce, started, then waited for",
    "sv.barrier()": "barrier()",
    "sv.send(x, other) there, sv.recv(other, out=out) back": "send there, recv back",
    "strategy.run(step) of one v.assign_add(x)": "strategy.run of one write",
    'sv.broadcast_object({"a": 1})': "broadcast_object",
    'sv.send_object({"a": 1}, other) there, sv.recv_object(other) back': "send_object and back",
}


def draw():
    """Return the picture of calls of 8 bytes with 2 workers."""
    rows = [(words, speed.row_of(call, 8)["ratio"]) for call, words in CALLS.items()]
    return speed.bars("Calls of 8 bytes, 2 workers: fastest peer / syncvar", rows)
