"""The description of a call: which fields the ranks compare, its label, and its record."""

import numpy as np
import pytest

from syncvar.collectives.reduce_args import ReduceOptions, describe_reduction
from syncvar.core.pytree import LEAF, TreeDef
from syncvar.runtime.call_record import CallInfo, PendingRecord, event_of
from syncvar.runtime.collective_spec import CollectiveSpec, fingerprint, spec_of

BASE = CollectiveSpec("all_reduce", "sum", dtype="float32", shape=(2, 3), elements=6, size=24)
COMPARED = {
    "collective": "reduce",
    "op": "max",
    "dtype": "int32",
    "shape": (3, 2),
    "root": 0,
    "algorithm": "ring",
    "reproducible": True,
    "structure": TreeDef("list", (), (LEAF,)),
    "kinds": (("float32", (2,)),),
    "options": (1,),
    "step": 1,
    "compared": "message",
}
NOT_COMPARED = {
    "elements": 7,
    "size": 25,
    "peer": 1,
    "tag": 1,
    "variable": "w",
    "access": "assign",
    "text": str,
    "shown": ("x",),
}


@pytest.mark.parametrize("name", COMPARED)
def test_ranks_that_differ_in_a_field_have_different_digests(name):
    assert BASE._replace(**{name: COMPARED[name]}).fingerprint != BASE.fingerprint


@pytest.mark.parametrize("name", NOT_COMPARED)
def test_fields_of_one_rank_are_not_compared(name):
    assert BASE._replace(**{name: NOT_COMPARED[name]}).fingerprint == BASE.fingerprint


def test_every_field_is_compared_or_not():
    assert COMPARED.keys() | NOT_COMPARED.keys() | {"is_uniform"} == {*CollectiveSpec._fields}


@pytest.mark.parametrize("name", ["dtype", "shape"])
def test_calls_whose_arrays_may_differ_do_not_compare_them(name):
    ragged = BASE._replace(is_uniform=False)
    assert ragged._replace(**{name: COMPARED[name]}).fingerprint == ragged.fingerprint
    assert ragged._replace(op="max").fingerprint != ragged.fingerprint


def test_a_call_may_compare_something_else_than_its_fields():
    sends = CollectiveSpec("send", dtype="int8", shape=(2,), peer=1, compared="message")
    receives = CollectiveSpec("recv", peer=0, compared="message")
    assert sends.fingerprint == receives.fingerprint == fingerprint("message")


def test_a_thousand_steps_have_different_digests_of_64_bits():
    digests = {BASE._replace(step=step).fingerprint for step in range(1000)}
    assert len(digests) == 1000
    assert all(0 <= digest < 1 << 64 for digest in digests)


def test_only_readers_of_the_label_build_it():
    built = []
    spec = BASE._replace(text=lambda spec: built.append(spec) or f"{spec.collective}({spec.op})")
    entry = PendingRecord(CallInfo(spec, fingerprint=spec.fingerprint), 0, 1)
    assert not built
    assert event_of(entry).label == f"{spec}" == "all_reduce(sum)"


def test_a_name_alone_is_a_description():
    assert spec_of("a call").label == spec_of("a call").collective == "a call"
    assert spec_of(BASE) is BASE


def test_the_parts_of_labels():
    options = ReduceOptions(reproducible=True)
    _, spec = describe_reduction(np.zeros((2, 3), np.float32), "sum", "reduce", options, root=1)
    assert spec.label == "reduce(sum, float32[2, 3], reproducible, root 1)"
    assert (spec.elements, spec.size, spec.tree) == (6, 24, "")


def test_a_record_has_the_fields_of_the_description():
    spec = BASE._replace(root=1, tag=5, variable="w", access="assign")
    event = event_of((CallInfo(spec, 3, (0, 1), 9, 24, "shm"), 0, 1, 2, 7))
    assert (event.collective, event.op, event.dtype) == ("all_reduce", "sum", "float32")
    assert (event.shape, event.elements, event.size) == ("[2, 3]", 6, 24)
    assert (event.root, event.peer, event.tag, event.fingerprint) == (1, -1, 5, 9)
    assert (event.variable, event.access) == ("w", "assign")


def test_a_table_has_the_variable_in_another_column():
    written = CollectiveSpec("assign of variable 'w'", variable="w", access="assign")
    assert (written.kind, BASE.kind) == ("assign", "all_reduce(sum)")
