"""Algorithms as data. This room decides who sends what to whom, and touches neither a byte nor a socket.

Goals, in order: a plan is correct, and proven so before it runs; a reader can see why; it is cheap to build.

A **collective** is a contract (`contracts`): who holds what before, who must hold what after, who must have heard of
whom. An **algorithm** is a generator of **rounds** for one rank (`ring`, `direct`, `owners`, `tree`, `double_tree`,
`doubling`, `halving`, `pairwise`, `bruck`, `chain`, `dissemination`, `reproducible`), a pure function of rank, world
size and count. A **plan** is those rounds, with the buffer sizes they need. The words are defined in `model`.

The checker (`checker`) runs the plans of all ranks on symbols. It keeps the order of operands, so it proves not only
that no contribution is lost or counted twice, but that every rank ends with the same bytes even if the operation is
not quite commutative (NaN payloads, -0.0) and not at all associative. It gives the plans no buffering to lean on, and
treats sent memory as borrowed until its receipt is known. It is itself checked: every single change to a small plan
must be rejected.

Rules that shaped the algorithms:

* The lower contributing rank is the left operand, so a result does not depend on who computes it.
* A transfer is in the same round at both ends, and every rank yields every round, empty if need be: the round is part
  of a message's name, and a figure shows one table per round.
* An empty chunk is sent like any other: sizes never change who talks to whom.
* A range that was sent is written only by what follows from its receipt. This is why the direct all-reduce sends a
  copy: with one round there is nothing that could follow.

Over several hosts a collective is composed of plans on each host and plans between them (`hierarchical`), and proven
as one.

In memory that all ranks see, a plan is read as publications (`published`): what is sent to several is put there once. Over
links it is run round by round, with what goes and what comes told apart beforehand (`link_rounds`).

One table (`table`) names the algorithms and builds them; an entry there is proven, mutated and timed by the tests. One
more (`select`) chooses among them, with a reason in words. `cost` predicts times, by the model in which the papers
count. `show` writes plans as text; the figures in tests/golden are made by it.

Example:
    >>> from syncvar.plans import build_all, contract_of, verify
    >>> plans = build_all("all_reduce", "ring", 5, count=7)
    >>> verify(plans, contract_of("all_reduce", 5, count=7)).rounds
    8
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from syncvar.loading import attributes_of
from syncvar.plans.bruck import bruck_all_to_all
from syncvar.plans.chain import chain_broadcast
from syncvar.plans.chunks import PIECES, consecutive_chunks, even_chunks, exchange_blocks
from syncvar.plans.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_all_to_all,
    direct_barrier,
    direct_broadcast,
    direct_exscan,
    direct_gather,
    direct_reduce,
    direct_reduce_scatter,
    direct_scan,
    direct_scatter,
)
from syncvar.plans.dissemination import dissemination_all_gather, dissemination_barrier
from syncvar.plans.double_tree import (
    double_tree_all_reduce,
    double_tree_broadcast,
    double_tree_reduce,
)
from syncvar.plans.doubling import (
    doubling_all_gather,
    doubling_all_reduce,
    doubling_exscan,
    doubling_scan,
)
from syncvar.plans.halving import halving_all_reduce
from syncvar.plans.hierarchical import COMPOSED, Part, flattened, keeps_the_tree, stages
from syncvar.plans.model import (
    Buffer,
    Chunk,
    Copy,
    Plan,
    Recv,
    RecvReduce,
    Reduce,
    Round,
    Send,
    Step,
)
from syncvar.plans.owners import owners_all_reduce, owners_reduce
from syncvar.plans.pairwise import pairwise_all_to_all, pairwise_reduce_scatter
from syncvar.plans.published import Publication, Take, publications
from syncvar.plans.reproducible import reproducible_all_reduce, tree_order, tree_steps
from syncvar.plans.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from syncvar.plans.select import Choice, choose, parse_forced, suited
from syncvar.plans.shards import runs_of, split, whole_nodes
from syncvar.plans.table import ALGORITHMS, build, build_all, sums_by_the_tree, unsuited
from syncvar.plans.tree import (
    binomial_all_reduce,
    binomial_broadcast,
    binomial_gather,
    binomial_reduce,
    binomial_scatter,
    scattered_broadcast,
)

if TYPE_CHECKING:
    from syncvar.plans.checker import Report, traffic, verify
    from syncvar.plans.contracts import (
        Contract,
        Expression,
        Wanted,
        all_gather_contract,
        all_reduce_contract,
        all_to_all_contract,
        barrier_contract,
        broadcast_contract,
        contract_of,
        gather_contract,
        reduce_contract,
        reduce_scatter_contract,
        scan_contract,
        scatter_contract,
        tree_expression,
    )
    from syncvar.plans.cost import ARENA, LINKS, CostModel, predicted_seconds
    from syncvar.plans.show import plan_text, step_text

_PROOFS = {  # what programs that run plans do not need is loaded when it is asked for
    "contracts": (
        "Contract",
        "Expression",
        "Wanted",
        "all_gather_contract",
        "all_reduce_contract",
        "all_to_all_contract",
        "barrier_contract",
        "broadcast_contract",
        "contract_of",
        "gather_contract",
        "reduce_contract",
        "reduce_scatter_contract",
        "scan_contract",
        "scatter_contract",
        "tree_expression",
    ),
    "cost": ("ARENA", "LINKS", "CostModel", "predicted_seconds"),
    "show": ("plan_text", "step_text"),
    "checker": ("Report", "traffic", "verify"),
}
_HOME = {name: f"{__name__}.{home}" for home, names in _PROOFS.items() for name in names}

__all__ = [
    "ALGORITHMS",
    "ARENA",
    "COMPOSED",
    "LINKS",
    "PIECES",
    "Buffer",
    "Choice",
    "Chunk",
    "Contract",
    "Copy",
    "CostModel",
    "Expression",
    "Part",
    "Plan",
    "Publication",
    "Recv",
    "RecvReduce",
    "Reduce",
    "Report",
    "Round",
    "Send",
    "Step",
    "Take",
    "Wanted",
    "all_gather_contract",
    "all_reduce_contract",
    "all_to_all_contract",
    "barrier_contract",
    "binomial_all_reduce",
    "binomial_broadcast",
    "binomial_gather",
    "binomial_reduce",
    "binomial_scatter",
    "broadcast_contract",
    "bruck_all_to_all",
    "build",
    "build_all",
    "chain_broadcast",
    "choose",
    "consecutive_chunks",
    "contract_of",
    "direct_all_gather",
    "direct_all_reduce",
    "direct_all_to_all",
    "direct_barrier",
    "direct_broadcast",
    "direct_exscan",
    "direct_gather",
    "direct_reduce",
    "direct_reduce_scatter",
    "direct_scan",
    "direct_scatter",
    "dissemination_all_gather",
    "dissemination_barrier",
    "double_tree_all_reduce",
    "double_tree_broadcast",
    "double_tree_reduce",
    "doubling_all_gather",
    "doubling_all_reduce",
    "doubling_exscan",
    "doubling_scan",
    "even_chunks",
    "exchange_blocks",
    "flattened",
    "gather_contract",
    "halving_all_reduce",
    "keeps_the_tree",
    "owners_all_reduce",
    "owners_reduce",
    "pairwise_all_to_all",
    "pairwise_reduce_scatter",
    "parse_forced",
    "plan_text",
    "predicted_seconds",
    "publications",
    "reduce_contract",
    "reduce_scatter_contract",
    "reproducible_all_reduce",
    "ring_all_gather",
    "ring_all_reduce",
    "ring_reduce_scatter",
    "runs_of",
    "scan_contract",
    "scatter_contract",
    "scattered_broadcast",
    "split",
    "stages",
    "step_text",
    "suited",
    "sums_by_the_tree",
    "traffic",
    "tree_expression",
    "tree_order",
    "tree_steps",
    "unsuited",
    "verify",
    "whole_nodes",
]

__getattr__ = attributes_of(__name__, _HOME)
