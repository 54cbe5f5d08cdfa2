"""Checkpoints as data: names, shards' headers, manifests that may come from anywhere, who writes what, what stays."""

import contextlib
import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncvar.checkpoint.checkpoint_format import (
    CODES,
    Label,
    Manifest,
    ManifestEntry,
    Piece,
    ShardFile,
    Stored,
    checked_path,
    digest_of,
    header_bytes,
    header_length,
    is_left_over,
    is_shard,
    itemsize_of,
    parse_header,
    shard_name,
    step_name,
    step_of,
)
from syncvar.checkpoint.checkpoint_reader import RetainedCheckpoint, best_of, removable
from syncvar.checkpoint.save_plan import (
    LeafHeader,
    entries_of,
    failure_of,
    lay_out,
    raise_failures,
    shares,
)
from syncvar.core.array_types import DTYPE_NAMES
from syncvar.core.errors import CheckpointError, ConfigError, Corrupt, MismatchError, NotFound

IDENTITY = "00112233aabbccdd"
DIGEST = "0" * 32


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "../" + shard_name(IDENTITY, 0, 1),
        "/" + shard_name(IDENTITY, 0, 1),
        shard_name(IDENTITY, 0, 1) + "\n",
        "shard-.safetensors",
        "",
    ],
)
def test_only_our_own_names_are_shards(name):
    assert not is_shard(name)
    assert not is_left_over(name, None)


def test_what_is_left_over():
    committed, other = shard_name(IDENTITY, 1, 2), shard_name("f" * 16, 1, 2)
    assert [
        is_left_over(name, IDENTITY)
        for name in (committed, other, "manifest.json", "weights.npz", "lock.json")
    ] == [
        False,
        True,
        False,
        False,
        False,
    ]
    assert is_left_over(committed, None)
    assert is_left_over(committed + ".tmp-" + IDENTITY, IDENTITY)
    assert not is_left_over("notes.tmp-" + IDENTITY, IDENTITY), "somebody else's file"


@given(st.integers(0, 10**19 - 1))
def test_steps_have_names_that_sort_as_they_do(step):
    assert step_of(step_name(step)) == step
    if step < 10**10 - 1:
        assert step_name(step) < step_name(step + 1)


@pytest.mark.parametrize("step", [-1, 1.0, True, "3", None, 10**19])
def test_a_step_that_is_none(step):
    with pytest.raises(ConfigError, match="step must be"):
        step_name(step)


@pytest.mark.parametrize("path", [b"x", 3, None, "", "a\0b"])
def test_a_path_that_is_none(path):
    with pytest.raises(ConfigError, match="path must be"):
        checked_path(path)


# -- shards ----------------------------------------------------------------------------------------


def test_every_dtype_that_can_travel_can_be_saved():
    assert set(CODES) == set(DTYPE_NAMES)


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=20),
        st.tuples(st.sampled_from(DTYPE_NAMES), st.lists(st.integers(0, 5), max_size=3).map(tuple)),
        max_size=6,
    )
)
def test_a_header_is_read_as_it_was_written(arrays):
    arrays.pop("__metadata__", None)
    described = [(name, dtype, shape) for name, (dtype, shape) in arrays.items()]
    header, tensors = header_bytes(described, {"rank": "0"})
    total = len(header) + sum(
        math.prod(shape) * itemsize_of(dtype) for _, dtype, shape in described
    )
    assert header_length(header[:8], total) == len(header)
    read, metadata = parse_header(header, total)
    assert read == {tensor.name: tensor for tensor in tensors}
    assert metadata == {"rank": "0"}


def _header(body, extra=0):
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + extra


@pytest.mark.parametrize(
    ("body", "extra", "words"),
    [
        ([], 0, "not a JSON object"),
        (b"{", 0, "not JSON"),
        (b'{"a": NaN}', 0, "number"),
        (b"[" * 100_000, 0, "not JSON"),
        (b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{}}', 1, "key twice"),
        ({"a": {"dtype": "U8", "shape": [1], "data_offsets": [1, 2]}}, 2, "hole"),
        (
            {
                "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
                "b": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]},
            },
            3,
            "overlap",
        ),
        ({"a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, 1, "end at byte"),
        (
            {"a": {"dtype": "U8", "shape": [1 << 61, 1 << 61], "data_offsets": [0, 4]}},
            4,
            "does not take",
        ),
        ({"a": {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}}, 1, "wrong dtype"),
        ({"a": {"dtype": "O", "shape": [1], "data_offsets": [0, 8]}}, 8, "wrong dtype"),
        ({"a": {"dtype": "U8", "shape": [True], "data_offsets": [0, 1]}}, 1, "wrong dtype"),
        (
            {"a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1], "code": "x"}},
            1,
            "has not dtype",
        ),
        ({"__metadata__": {"a": 1}}, 0, "metadata"),
    ],
)
def test_a_header_that_lies(body, extra, words):
    data, nbytes = _header(body, extra)
    with pytest.raises(CheckpointError, match=words):
        parse_header(data, nbytes)


@pytest.mark.parametrize("length", [1 << 63, 17 << 20, 93])
def test_a_header_that_claims_too_much(length):
    with pytest.raises(CheckpointError, match="claims"):
        header_length(length.to_bytes(8, "little"), 100)


# -- manifests -------------------------------------------------------------------------------------


def manifest():
    value = Stored("float32", (3,), (Piece(0, 0, 2, DIGEST), Piece(1, 2, 3, DIGEST)))
    copies = {0: Stored("int8", (), (Piece(0, 0, 1, DIGEST),)), 1: Stored("bool", (0, 4), ())}
    entries = {
        "w": ManifestEntry("variable", "ON_WRITE SUM", 2, value),
        "a/b": ManifestEntry("variable", "NONE NONE", 2, None, copies),
    }
    return Manifest(
        IDENTITY,
        2,
        Label(7, 0.5, 3),
        {0: ShardFile(100, DIGEST), 1: ShardFile(90, DIGEST)},
        entries,
    )


def test_a_manifest_is_read_as_it_was_written():
    data = manifest().to_bytes()
    assert Manifest.from_bytes(data) == manifest()
    assert (
        json.loads(data)["shards"]["1"]["file"]
        == "shard-00112233aabbccdd-00001-of-00002.safetensors"
    )
    assert list(json.loads(data)) == sorted(json.loads(data))


def test_every_flipped_bit_of_a_manifest_is_seen():
    data = manifest().to_bytes()
    for at in range(len(data)):
        for bit in (0, 3, 6):
            mutant = data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            try:
                assert Manifest.from_bytes(mutant) == manifest(), (at, bit)  # white space
            except CheckpointError:
                continue


def test_a_changed_number_is_corrupt():
    data = manifest().to_bytes().replace(b'"step": 7', b'"step": 8')
    with pytest.raises(Corrupt) as caught:
        Manifest.from_bytes(data)
    assert caught.value.key == "the manifest"
    assert caught.value.expected != caught.value.actual


def sealed(**changes):
    """Return the bytes of a manifest that somebody changed, and gave the digest that fits."""
    body = json.loads(manifest().to_bytes())
    del body["digest"]
    for path, value in changes.items():
        at = body
        *above, last = path.split("__")
        for key in above:
            at = at[key.replace("_", "/") if key == "a_b" else key]
        at[last] = value
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps(body | {"digest": digest_of(canonical)}).encode()


def test_sealed_gives_what_can_be_read():
    assert Manifest.from_bytes(sealed(step=9)).label.step == 9


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "pickle"}, "format"),
        ({"version": 2}, "version 2"),
        ({"identity": "../../etc/passwd"}, "hexadecimal"),
        ({"world_size": 1 << 40}, "out of range"),
        ({"world_size": True}, "not of type int"),
        ({"world_size": 1}, "more than 1 ranks"),
        ({"shards": {"0": {"nbytes": 100, "header_digest": DIGEST}}}, "does not fit"),
        ({"shards": {"00": {"nbytes": 100, "header_digest": DIGEST}}}, "not a rank"),
        ({"shards": []}, "not of type dict"),
        ({"metric": 0.5}, "not of type str"),
        ({"entries__w__kind": "code"}, "unknown kind"),
        ({"entries__w__value__dtype": "object"}, "unknown dtype"),
        ({"entries__w__value__dtype": "V1000000000"}, "unknown dtype"),
        ({"entries__w__value__shape": [1 << 50]}, "does not fit|end at element"),
        ({"entries__w__value__shape": [1 << 60, 1 << 60]}, "impossible shape"),
        ({"entries__w__value__shape": [-3]}, "out of range"),
        ({"entries__w__value__pieces": [[0, 0, 2, DIGEST]]}, "end at element 2 of 3"),
        ({"entries__w__value__pieces": [[0, 0, 2, DIGEST], [1, 1, 3, DIGEST]]}, "overlap"),
        ({"entries__w__value__pieces": [[0, 0, 3]]}, "not of the right form"),
        ({"entries__w__value__pieces": [[0, 0, 3, "x" * 32]]}, "hexadecimal"),
        ({"entries__w__value__pieces": [[9, 0, 3, DIGEST]]}, "does not fit"),
        (
            {"entries__w__copies": {"0": {"dtype": "bool", "shape": [0], "pieces": []}}},
            "a value or copies",
        ),
        (
            {"entries__a_b__copies": {"2": {"dtype": "bool", "shape": [0], "pieces": []}}},
            "more than 2 replicas",
        ),
        ({"entries": {"x": {}}}, "not of the right form"),
    ],
)
def test_a_manifest_that_lies(changes, words):
    with pytest.raises(CheckpointError, match=words):
        Manifest.from_bytes(sealed(**changes))


@settings(max_examples=40, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
        ),
    ),
    st.sampled_from(
        [
            "identity",
            "world_size",
            "step",
            "metric",
            "shards",
            "entries",
            "entries__w",
            "entries__w__value",
            "entries__a_b__copies",
        ]
    ),
)
def test_anything_in_a_manifest_is_an_error_or_a_manifest(junk, where):
    with contextlib.suppress(CheckpointError):
        Manifest.from_bytes(sealed(**{where: junk})).check()


@given(st.binary(max_size=200))
def test_any_bytes_are_an_error(data):
    with pytest.raises(CheckpointError):
        Manifest.from_bytes(data)


def test_which_copy_a_replica_takes():
    copies = {number: Stored("int8", (number,), ()) for number in range(3)}
    entry = ManifestEntry("variable", "NONE NONE", 3, None, copies)

    def taken(policy, replicas, own=True):
        found = [
            entry.choose("v", replica, replicas, policy, own=own) for replica in range(replicas)
        ]
        return [None if one is None else one.shape[0] for one in found]

    assert taken("same_rank_or_initial", 5) == [0, 1, 2, None, None]
    assert taken("same_rank_or_initial", 2) == [0, 1]
    assert taken("cycle", 5) == [0, 1, 2, 0, 1]
    assert taken("error", 3) == [0, 1, 2]
    assert taken("error", 5, own=False) == [0] * 5, (
        "a variable of one value takes replica 0's, whatever the policy"
    )
    with pytest.raises(CheckpointError, match=r"saved by 3 replicas.*restored by 2"):
        taken("error", 2)


# -- who writes what -------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 50), st.sampled_from([1, 2, 4, 8, 16])), max_size=8),
    st.integers(1, 9),
)
def test_the_shares_cover_everything_once_and_evenly(sizes, count):
    values = [
        (str(number), elements, itemsize) for number, (elements, itemsize) in enumerate(sizes)
    ]
    parts = shares(values, list(range(count)))
    nbytes = [0] * count
    for key, elements, itemsize in values:
        mine = [part for part in parts if part.key == key]
        assert [part.start for part in mine] == [0, *[part.stop for part in mine[:-1]]][: len(mine)]
        assert (mine[-1].stop if mine else 0) == elements
        for part in mine:
            nbytes[part.rank] += (part.stop - part.start) * itemsize
    total = sum(elements * itemsize for _, elements, itemsize in values)
    assert all(abs(one - total / count) <= 16 for one in nbytes)


def brought(**changes):
    base = {
        "kind": "variable",
        "mode": "ON_WRITE SUM",
        "dtype": "float32",
        "shape": (4,),
        "replica": 0,
        "members": (0, 1),
        "own": False,
    }
    return LeafHeader(**(base | changes))


def test_entries_follow_the_layout():
    everyone = [
        {
            "w": brought(),
            "n": brought(own=True, shape=(1,)),
            "s": brought(kind="state", own=None, digest="a", dtype="uint8", shape=(2,)),
        },
        {
            "w": brought(replica=1),
            "s": brought(kind="state", own=None, digest="b", dtype="uint8", shape=(3,), replica=1),
        },
    ]
    layout = lay_out(everyone, (4, 7))
    assert layout.own == {"n", "s"}, "one has it, and states that differ"
    made = entries_of(
        layout, [{"w": "a" * 32, "n": "b" * 32, "s": "c" * 32}, {"w": "d" * 32, "s": "e" * 32}]
    )
    assert [piece[:3] for piece in made["w"].value.pieces] == [(0, 0, 2), (1, 2, 4)]
    assert {replica: stored.shape for replica, stored in made["s"].copies.items()} == {
        0: (2,),
        1: (3,),
    }
    assert set(made["n"].copies) == {0}


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": (5,)},
        {"dtype": "int8"},
        {"mode": "ON_READ SUM"},
        {"kind": "state"},
        {"own": True},
        {"members": (1,)},
    ],
)
def test_ranks_that_save_different_things(changes):
    with pytest.raises(MismatchError, match="'w'") as caught:
        lay_out([{"w": brought()}, {"w": brought(replica=1, **changes)}], (4, 7))
    assert set(caught.value.table) == {4, 7}


def test_a_rank_without_a_value_that_all_have():
    with pytest.raises(MismatchError) as caught:
        lay_out([{"w": brought()}, {}], (4, 7))
    assert caught.value.table[7] == "has no object of this name"


@pytest.mark.parametrize(
    "error", [NotFound("no"), CheckpointError("full"), Corrupt("w", "1", "2", "there")]
)
def test_a_failure_is_of_its_kind_on_every_rank(error):
    failures = {3: failure_of(error)}
    with pytest.raises(type(error)) as own:
        raise_failures(failures, error, "nothing was saved")
    assert own.value is error
    with pytest.raises(type(error), match="rank 3") as told:
        raise_failures(failures, None, "nothing was saved")
    assert type(told.value) is type(error)
    assert getattr(told.value, "expected", "1") == "1"
    raise_failures({}, None, "")


# -- what stays ------------------------------------------------------------------------------------


def test_the_latest_and_the_best_stay():
    kept = [
        RetainedCheckpoint(step, metric)
        for step, metric in [(4, 0.5), (1, 0.9), (2, float("nan")), (3, None), (5, 0.7)]
    ]
    assert [one.step for one in removable(kept, 2, None)] == [1, 2, 3]
    assert [one.step for one in removable(kept, 2, "max")] == [2, 3]
    assert [one.step for one in removable(kept, 1, "min")] == [1, 2, 3]
    assert removable(kept, None, "max") == []
    assert best_of(kept[2:4], "max") is None
    assert best_of([RetainedCheckpoint(1, 0.5), RetainedCheckpoint(2, 0.5)], "min").step == 2


def test_retention_goes_by_the_number_of_the_save_and_a_damaged_one_does_not_count():
    saves = [
        RetainedCheckpoint(90),
        RetainedCheckpoint(100),
        RetainedCheckpoint(50, 0.5, 1),
        RetainedCheckpoint(40, 0.9, 2),
        RetainedCheckpoint(45, 0.5, 3),
    ]
    assert [one.step for one in removable(saves, 2, None)] == [90, 100, 50]
    assert [one.step for one in removable(saves, 1, "max")] == [90, 100, 50]
    assert best_of(saves, "min").step == 45
    saves[-1] = RetainedCheckpoint(45, None, 3, is_whole=False)
    assert [one.step for one in removable(saves, 2, None)] == [90, 100]
    assert removable([*saves, RetainedCheckpoint(60, None, 4)], 1, None) == [
        RetainedCheckpoint(90),
        RetainedCheckpoint(100),
        *saves[2:],
    ]


def test_a_manifest_without_a_number_of_the_save_is_of_an_earlier_version():
    body = json.loads(Manifest(IDENTITY, 1).to_bytes())
    assert "save_number" not in body
    assert Manifest.from_bytes(sealed()).label.number == 3
    for wrong in (-1, "3", True, None):
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(sealed(save_number=wrong))
