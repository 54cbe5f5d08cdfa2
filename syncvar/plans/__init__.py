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
    >>> from syncvar.plans.checker import verify
    >>> from syncvar.plans.contracts import contract_of
    >>> from syncvar.plans.table import build_all
    >>> plans = build_all("all_reduce", "ring", 5, count=7)
    >>> verify(plans, contract_of("all_reduce", 5, count=7)).rounds
    8
"""
