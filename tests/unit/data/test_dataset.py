"""Datasets against a model in plain lists: any sequence of steps, any source, from any position."""

import itertools
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import syncvar as sv
from syncvar.core.errors import ConfigError
from syncvar.data import Dataset, from_arrays, from_generator, stream_sources
from syncvar.data.batches import (
    BatchPolicy,
    content_digest,
    even_part,
    inspect_batch,
    map_leaves,
    no_rows,
    stack_elements,
)
from syncvar.data.indexed_sources import permutation


def kind_of(batch):
    return inspect_batch(batch)[2]


class Pair(NamedTuple):
    x: Any
    y: Any


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("shuffle"), st.integers(0, 3)),
        st.integers(1, 4).flatmap(
            lambda n: st.tuples(st.just("shard"), st.just(n), st.integers(0, n - 1))
        ),
        st.tuples(st.just("batch"), st.integers(1, 4), st.booleans()),
        st.tuples(st.just("map")),
        st.tuples(st.just("repeat"), st.integers(1, 3)),
    ),
    max_size=5,
)


def applied(dataset, steps):
    for name, *given_ in steps:
        if name == "map":
            dataset = dataset.map(lambda x: np.asarray(x) + 1000)
        elif name == "batch":
            dataset = dataset.batch(given_[0], drop_remainder=given_[1])
        elif name == "shuffle":
            dataset = dataset.shuffle(seed=given_[0])
        else:
            dataset = getattr(dataset, name)(*given_)
    return dataset


def model(rows, steps, epoch):
    """Return the elements of an epoch as nested lists."""
    if not steps:
        return list(range(rows))
    *before, (name, *given_) = steps
    if name == "repeat":
        return [
            x
            for number in range(given_[0])
            for x in model(rows, before, epoch * given_[0] + number)
        ]
    inner = model(rows, before, epoch)
    if name == "shuffle":
        return [inner[place] for place in permutation(len(inner), given_[0], epoch)]
    if name == "shard":
        return inner[given_[1] :: given_[0]]
    if name == "map":
        return [(np.asarray(x) + 1000).tolist() for x in inner]
    size, drop = given_
    return [
        inner[at : at + size]
        for at in range(0, len(inner), size)
        if not drop or at + size <= len(inner)
    ]


def has_ragged_batches(steps):
    """Return whether batches of batches may differ in length, which cannot be stacked."""
    seen = False
    for name, *given_ in steps:
        if name == "batch":
            if seen:
                return True
            seen = not given_[1]
    return False


@settings(max_examples=150, deadline=None)
@given(rows=st.integers(0, 13), steps=STEPS, epoch=st.integers(0, 2), position=st.integers(0, 9))
def test_any_pipeline_over_any_source_from_any_position(rows, steps, epoch, position):
    if has_ragged_batches(steps):
        steps = [step for step in steps if step[0] != "batch"]
    expected = model(rows, steps, epoch)
    indexed = applied(from_arrays(np.arange(rows), batch_size=None), steps)
    stream = applied(from_generator(lambda: range(rows)), steps)
    for dataset in (indexed, stream):
        assert [np.asarray(x).tolist() for x in dataset.at(epoch)] == expected
        assert [np.asarray(x).tolist() for x in dataset.at(epoch, position)] == expected[position:]
    assert len(indexed) == len(expected)
    assert (
        indexed.seed
        == stream.seed
        == ",".join(str(step[1]) for step in steps if step[0] == "shuffle")
    )


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 7), position=st.integers(0, 40), epoch=st.integers(0, 2))
def test_repeating_without_end(rows, position, epoch):
    for dataset in (
        from_arrays(np.arange(rows), batch_size=None),
        from_generator(lambda: range(rows)),
    ):
        endless = dataset.shuffle(seed=5).repeat()
        expected = [
            x for number in range(12) for x in model(rows, [("shuffle", 5)], epoch + number)
        ]
        found = [int(x) for _, x in zip(range(10), endless.at(epoch, position), strict=False)]
        if len(expected) >= position + 10:
            assert found == expected[position : position + 10]
        with pytest.raises(TypeError, match="does not know its length"):
            len(endless)
    assert list(from_generator(list).repeat()) == []
    assert list(from_arrays(np.empty(0), batch_size=None).repeat(3).batch(2)) == []


@given(count=st.integers(0, 200), seed=st.integers(0, 1 << 70), epoch=st.integers(0, 1000))
def test_a_permutation_has_every_index_once(count, seed, epoch):
    order = permutation(count, seed, epoch)
    assert sorted(order.tolist()) == list(range(count))
    assert order.tolist() == permutation(count, seed, epoch).tolist()


def test_orders_are_fixed_for_all_machines_and_versions():
    assert permutation(8, 0, 0).tolist() == [3, 2, 1, 6, 0, 7, 4, 5]
    assert permutation(8, 0, 1).tolist() != permutation(8, 1, 0).tolist()
    found = {tuple(permutation(4, 7, epoch)) for epoch in range(600)}
    assert len(found) == 24, "every order comes up"


def test_batches_of_arrays():
    data = {"y": np.arange(5), "x": np.arange(10.0).reshape(5, 2)}
    batches = list(from_arrays(data, batch_size=2))
    assert [batch["y"].tolist() for batch in batches] == [[0, 1], [2, 3], [4]]
    assert list(batches[0]) == ["y", "x"]
    assert len(from_arrays(data, batch_size=2, drop_remainder=True)) == 2
    batches[0]["x"][...] = -1
    assert data["x"][0, 0] == 0, "what is read is a copy"
    one, other = (from_arrays(data, batch_size=3, shuffle=True, seed=4) for _ in range(2))
    first, second = ([batch["y"].tolist() for batch in one] for _ in range(2))
    assert first != second, "each epoch has its order"
    assert [batch["y"].tolist() for batch in other] == first
    assert sorted(row for batch in first for row in batch) == [0, 1, 2, 3, 4]
    pair = next(iter(from_arrays(Pair(np.arange(2), [3.0, 4.0]), batch_size=2)))
    assert isinstance(pair, Pair)
    names = np.array(["a", "bc"])
    assert next(iter(from_arrays(names, batch_size=2))).tolist() == ["a", "bc"]


def test_a_position_is_saved_and_loaded():
    def dataset(seed=3):
        return from_arrays(np.arange(20), batch_size=3, shuffle=True, seed=seed)

    whole = [
        [batch.tolist() for batch in epoch] for one in [dataset()] for epoch in (one, one, one)
    ]
    reading = dataset()
    list(reading)
    iterator = iter(reading)
    next(iterator)
    state = iterator.state_dict()
    assert state == {"epoch": 1, "position": 1, "seed": "3"}
    again = dataset()
    iterator = iter(again)
    iterator.load_state_dict(state)
    assert [batch.tolist() for batch in iterator] == whole[1][1:]
    assert iterator.state_dict()["position"] == 7
    assert list(iterator) == []
    assert [batch.tolist() for batch in again] == whole[2], "the next epoch is the one after it"
    for wrong, words in (
        ({"epoch": 0}, "has no position, seed"),
        ({"epoch": 0, "position": -1, "seed": "3"}, "position must be"),
        ({"epoch": 0, "position": 1, "seed": "4"}, "seed '4', this iterator has '3'"),
        ([1, 2], "is a dict, not list"),
    ):
        with pytest.raises(ConfigError, match=words):
            iterator.load_state_dict(wrong)
    iterator = iter(dataset())
    next(iterator)
    iterator.close()
    assert next(iterator).tolist() == whole[0][1]


def test_what_a_map_sees():
    seen = []
    dataset = from_generator(lambda: range(6)).map(lambda x: seen.append(x) or x)
    assert list(dataset.at(0, 4)) == [4, 5]
    assert seen == [4, 5], "elements that are left out are not computed"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: from_arrays(np.arange(3), batch_size=0),
            "the batch size must be an integer of at least 1, not 0",
        ),
        (lambda: from_arrays(np.arange(3), batch_size=2.0), "batch size"),
        (
            lambda: from_arrays(np.arange(3), batch_size=1, shuffle=1),
            "shuffle must be True or False",
        ),
        (lambda: from_arrays(np.arange(3), batch_size=1, seed=-1), "seed must be"),
        (lambda: from_arrays(3.0, batch_size=1), "no first axis"),
        (lambda: from_arrays({}, batch_size=1), "contains no array"),
        (lambda: from_arrays((np.zeros(2), np.zeros(3)), batch_size=1), "one length, not 2, 3"),
        (lambda: from_generator([1, 2]), "fn must be a function, not list"),
        (lambda: list(from_generator(lambda: 5)), "must return an iterable of elements, not int"),
        (lambda: from_generator(list).map(3), "fn must be a function"),
        (lambda: from_generator(list).shard(2, 2), "index 2 is outside 2 shards"),
        (lambda: from_generator(list).shard(0, 0), "num_shards"),
        (lambda: from_generator(list).repeat(0), "times"),
        (lambda: from_generator(list).prefetch(0), "size"),
        (lambda: from_generator(list).shuffle(seed="a"), "seed"),
        (
            lambda: from_generator(list).shuffle(1000),
            r"no buffer.*1000.*write dataset.shuffle\(\)",
        ),
        (
            lambda: from_generator(list).shuffle(buffer_size=7),
            "no buffer.*7.*another order .SV-101.$",
        ),
        (
            lambda: from_generator(list).repeat().shuffle(7),
            "buffer_size=7.*another order, and before repeat, which has no end .SV-101.$",
        ),
        (lambda: from_generator(list).batch(2, drop_remainder=None), "drop_remainder"),
        (lambda: from_generator(list).at(-1), "epoch"),
        (
            lambda: list(from_generator(lambda: [[1, 2], [1, 2, 3]]).batch(2)),
            r"shapes \(2,\), \(3,\) cannot be one batch",
        ),
        (
            lambda: list(from_generator(lambda: [{"a": 1}, {"b": 1}]).batch(2)),
            "different structures",
        ),
    ],
)
def test_wrong_arguments(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


ENDLESS = {
    "rows": lambda: from_arrays(np.arange(10), batch_size=None).repeat(),
    "generated": lambda: from_generator(lambda: range(10)).repeat(),
    "a generator without end": lambda: from_generator(itertools.count),
}
STREAMED = {
    "shard": lambda dataset: dataset.shard(3, 1),
    "batch": lambda dataset: dataset.batch(4),
    "map": lambda dataset: dataset.map(lambda x: x),
    "prefetch": lambda dataset: dataset.prefetch(2),
    "repeat": lambda dataset: dataset.repeat(),
    "repeat three times": lambda dataset: dataset.repeat(3),
    "begin at a place": lambda dataset: dataset.at(epoch=1, position=7),
    "all": lambda dataset: (
        dataset.shard(2, 0).map(lambda x: x).batch(2, drop_remainder=True).repeat().prefetch(1)
    ),
    "distribute": lambda dataset: sv.get_strategy().experimental_distribute_dataset(
        dataset.batch(2)
    ),
    "distribute from a function": lambda dataset: (
        sv.get_strategy().distribute_datasets_from_function(
            lambda context: dataset.shard(
                context.num_input_pipelines, context.input_pipeline_id
            ).batch(2)
        )
    ),
}


def public_steps():
    return {
        name
        for name, member in vars(Dataset).items()
        if callable(member) and not name.startswith("_")
    }


@pytest.mark.timeout(30)
@pytest.mark.parametrize("source", ENDLESS)
@pytest.mark.parametrize("step", STREAMED)
def test_a_step_of_an_endless_dataset_is_read_as_it_comes(source, step):
    elements = iter(STREAMED[step](ENDLESS[source]()))
    found = [next(elements) for _ in range(5)]
    assert len(found) == 5
    getattr(elements, "close", lambda: None)()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("source", ENDLESS)
def test_a_step_that_needs_all_elements_of_an_endless_dataset_is_refused(source, monkeypatch):
    monkeypatch.setattr(stream_sources, "SHUFFLED_MAX", 2_000)
    dataset = ENDLESS[source]()
    is_known = source != "a generator without end"
    for whole in (
        dataset,
        dataset.map(lambda x: x).prefetch(1).shard(2, 0),
        dataset.batch(2).repeat(2),
    ):
        with pytest.raises(
            ConfigError, match="shuffle before repeat" if is_known else "without an end"
        ):
            next(iter(whole.shuffle(seed=1)))
        with pytest.raises(TypeError, match="repeats without end" if is_known else "are generated"):
            len(whole)
        assert ("endless" if is_known else "unknown") in repr(whole)


@pytest.mark.timeout(30)
def test_a_generator_that_does_not_end_is_not_shuffled_for_ever():
    with pytest.raises(ConfigError, match="has yielded 1048576 without an end"):
        next(iter(from_generator(itertools.count).shuffle()))


def test_every_step_is_checked_against_endless_datasets():
    assert public_steps() == {"shuffle", "shard", "batch", "map", "repeat", "prefetch", "at"}


def test_what_would_shuffle_or_deal_out_batches_of_from_arrays_is_refused():
    made = from_arrays(np.arange(10), batch_size=4)
    for dataset in (made, made.map(lambda x: x), made.repeat(2), made.repeat(), made.prefetch(1)):
        with pytest.raises(
            ConfigError, match=r"shuffle would reorder whole.*batch_size=4, shuffle=True, seed=3\)"
        ):
            dataset.shuffle(seed=3)
        with pytest.raises(
            ConfigError,
            match=r"shard would distribute whole.*batch_size=None\)\.shard\(2, 1\)\.batch\(4\)",
        ):
            dataset.shard(2, 1)
    rows = from_arrays(np.arange(10), batch_size=None)
    by_rows = [batch.tolist() for batch in rows.shuffle(seed=3).batch(4)]
    assert [
        batch.tolist() for batch in from_arrays(np.arange(10), batch_size=4, shuffle=True, seed=3)
    ] == by_rows
    assert [batch.tolist() for batch in rows.shard(2, 1).batch(4)] == [[1, 3, 5, 7], [9]]
    assert sorted(batch.tolist() for batch in rows.batch(5).shuffle()) == [
        [0, 1, 2, 3, 4],
        [5, 6, 7, 8, 9],
    ], "asked for"


@given(rows=st.integers(0, 60), parts=st.integers(1, 9))
def test_parts_of_a_batch_are_even_and_cover_it(rows, parts):
    batch = {"a": np.arange(rows), "b": [np.arange(rows * 2.0).reshape(rows, 2)]}
    cut = [even_part(batch, rows, parts, index) for index in range(parts)]
    sizes = [inspect_batch(part)[1] for part in cut]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert np.concatenate([part["a"] for part in cut]).tolist() == list(range(rows))
    assert all(part["b"][0].shape == (size, 2) for part, size in zip(cut, sizes, strict=True))
    assert all(part["a"].dtype == batch["a"].dtype for part in cut)


@pytest.mark.parametrize(
    "batch",
    [
        np.zeros((3, 2), np.float16),
        {"x": np.zeros((3, 0, 4), bool), "n": (np.arange(3), [np.zeros(3, complex)])},
        (
            np.array(["a", "bb", "c"]),
            np.array([b"x"] * 3),
            np.array([None] * 3),
            np.zeros(3, "datetime64[s]"),
        ),
    ],
)
def test_a_kind_can_travel_and_makes_batches_without_rows(batch):
    from syncvar.protocol.object_codec import pack_object, unpack_object

    kind = kind_of(batch)
    again = BatchPolicy.from_plain(unpack_object(pack_object(kind.plain())))
    assert again == kind
    assert kind_of(again.no_rows()) == kind
    assert inspect_batch(again.no_rows())[1] == 0
    assert kind_of(no_rows(batch)) == kind


def test_kinds_differ_where_batches_do_not_fit_together():
    kinds = [
        kind_of(batch)
        for batch in (
            np.zeros((3, 2)),
            np.zeros((3, 3)),
            np.zeros((3, 2), np.float32),
            [np.zeros((3, 2))],
            (np.zeros((3, 2)),),
        )
    ]
    assert len(set(kinds)) == 5
    assert kind_of(np.array(["a"])) == kind_of(np.array(["abc"])), "lengths of texts may differ"
    with pytest.raises(ConfigError, match="cannot have an array of dtype"):
        kind_of(np.zeros(2, [("a", int)]))


def test_a_kind_of_unknown_dtype_is_refused():
    with pytest.raises(ConfigError, match="no dtype 'evil'"):
        BatchPolicy.from_plain([["leaf", [], []], [["evil", []]]]).no_rows()


def test_contents_have_digests():
    large = np.zeros((1 << 18, 4))
    assert content_digest({"a": large}) == content_digest({"a": large.copy()})
    assert content_digest(np.arange(4)) != content_digest(np.arange(4)[::-1])
    assert content_digest(np.empty(0)) == content_digest(np.array([object()]))
    changed = large.copy()
    changed[5, 1] = 1
    assert content_digest(changed) != content_digest(large)


def test_structures_keep_their_types():
    assert map_leaves(len, Pair([1, 2], {"b": np.zeros(3), "a": (np.zeros(1),)})) == Pair(
        2, {"b": 3, "a": (1,)}
    )
    made = stack_elements([Pair(1, [np.zeros(2)]), Pair(2, [np.ones(2)])])
    assert isinstance(made, Pair)
    assert made.x.tolist() == [1, 2]
    assert made.y[0].tolist() == [[0, 0], [1, 1]]
    assert inspect_batch([1, 2, 3])[0].tolist() == [1, 2, 3]
