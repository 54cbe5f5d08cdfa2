"""Draw how fast gradients are averaged beside torch's DDP, for docs/benchmarks.md."""

import speed

KINDS = {
    "sv.all_reduce(list, 'mean', out=list), ordinary arrays": "a list of ordinary arrays",
    "the same, arrays of sv.empty": "a list of arrays of sv.empty",
    "sv.assign_add_all of 161 MEAN variables": "161 variables",
}


def draw():
    """Return the picture of ResNet-50's gradients."""
    head, tail = "ResNet-50's gradients, 2 workers, ", ", against DDP over gloo"
    rows = [(words, speed.value_of(f"{head}{kind}{tail}")) for kind, words in KINDS.items()]
    title = "161 gradients of ResNet-50, 2 workers: DDP over gloo / syncvar"
    return speed.bars(title, rows, ends=("DDP is faster", "syncvar is faster"))
