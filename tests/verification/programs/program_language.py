"""Programs as data: what the generator makes, the model predicts and the replicas execute.

A program is a number of replicas, a list of variables, and blocks of steps. A block says where its steps are made: under
which strategy, in which context. Each step names variables by their number and holds one operand for each replica.
"""

from typing import NamedTuple

STRATEGIES = (
    "default",
    "plain",
    "strict",
)  # by number: the owner of a variable, the strategy of a block
OUTSIDE, CROSS, REPLICA, MERGE = "outside", "cross", "replica", "merge"
PLACES = (OUTSIDE, CROSS, REPLICA, MERGE)


class Operand(NamedTuple):
    """A value to pass.

    kind: "array" | "mirrored" | "per_replica" (data: nested list, dtype), "python" (data: number or nested list),
    "variable" (data: its number), "none", "text".
    """

    kind: str
    data: object = None
    dtype: str = ""


class Made(NamedTuple):
    """A variable to make; everything may be wrong.

    values: The initial value of each replica. ranks: Where it is made (NONE only); None means everywhere.
    """

    synchronization: str
    aggregation: str
    dtype: str | None
    values: tuple[Operand, ...]
    ranks: tuple[int, ...] | None = None


class Step(NamedTuple):
    """One call.

    kind: "create", "deepcopy", "read", "local", "sync", "read_from", "write", "scatter", "crossed", "reduce", "gather",
        "all_reduce", "all_gather", "raise", "run", "scope".
    variable: Its number; for "crossed" that of the odd replica is `other`; for "scope" the strategy.
    other: See variable; for reductions and gathers, 1 means inside a structure.
    op: The write, the scatter, the reduction, the way of reading.
    operands: One for each replica.
    indices: Rows, for each replica.
    ranks: Which replicas make the call; None means all.
    """

    kind: str
    variable: int = 0
    op: str = ""
    operands: tuple[Operand, ...] = ()
    indices: tuple[tuple[int, ...], ...] = ()
    ranks: tuple[int, ...] | None = None
    other: int = 0
    odd: int = 0
    axis: object = None
    made: Made | None = None


class Block(NamedTuple):
    """Steps made in one place."""

    strategy: int
    place: str
    steps: tuple[Step, ...]


class Program(NamedTuple):
    """The whole: `variables` are (strategy, Made)."""

    size: int
    variables: tuple[tuple[int, Made], ...]
    blocks: tuple[Block, ...]


def shown(program):
    """Return a program as text that a person can read: one line for each variable and step."""
    lines = [f"{program.size} replicas"]
    lines += [
        f"  v{number}: {STRATEGIES[owner]} {made}"
        for number, (owner, made) in enumerate(program.variables)
    ]
    for block in program.blocks:
        lines.append(f"  {block.place} of {STRATEGIES[block.strategy]}:")
        for step in block.steps:
            fields = {
                name: value
                for name, value in step._asdict().items()
                if value != Step._field_defaults.get(name)
            }
            lines.append("    " + " ".join(f"{name}={value}" for name, value in fields.items()))
    return "\n".join(lines)
