"""The contract between launcher and worker: what one writes, the other reads; a half of it is refused."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncvar.core.environment import RankEnvironment
from syncvar.core.errors import ConfigError

ME = RankEnvironment(3, 8, 1, 2, 1, 4, 0, "ipc:///x/store", "job-1", "worker", "box", "/logs")
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)


@st.composite
def environments(draw):
    world, local, hosts = (
        draw(st.integers(1, 5000)),
        draw(st.integers(1, 300)),
        draw(st.integers(1, 99)),
    )
    return RankEnvironment(
        draw(st.integers(0, world - 1)),
        world,
        draw(st.integers(0, local - 1)),
        local,
        draw(st.integers(0, hosts - 1)),
        hosts,
        draw(st.integers(0, 99)),
        *(draw(texts) for _ in range(7)),
        draw(st.integers(0, 99)),
    )


@settings(max_examples=300, deadline=None)
@given(environments())
def test_what_the_launcher_writes_the_worker_reads(me):
    assert RankEnvironment.from_mapping(me.to_mapping()) == me
    assert RankEnvironment.from_mapping({"PATH": "/bin"} | me.to_mapping()) == me


def test_the_plain_names_are_written_too_and_never_read():
    written = ME.to_mapping()
    assert {
        name: written[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    } == {
        "RANK": "3",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
    }
    assert RankEnvironment.from_mapping({"RANK": "3", "WORLD_SIZE": "8"}) is None


NEEDED = [
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "HOST_INDEX",
    "GENERATION",
    "RENDEZVOUS",
    "JOB_ID",
]


@pytest.mark.parametrize("name", NEEDED)
def test_a_missing_half_is_refused_by_name(name):
    written = ME.to_mapping()
    del written["SYNCVAR_" + name]
    with pytest.raises(ConfigError, match=f"SYNCVAR_{name} is not"):
        RankEnvironment.from_mapping(written)


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "HOST_INDEX",
        "HOST_COUNT",
        "GENERATION",
        "RESTARTS",
    ],
)
@pytest.mark.parametrize(
    "text", ["", "x", "-1", "1.5", "1e3", " 1", "1 ", "0x1", "²", "٣", "1" * 30 + "x"]
)
def test_what_is_no_whole_number_is_refused_by_name(name, text):
    with pytest.raises(ConfigError, match=f"SYNCVAR_{name} must be a non-negative integer"):
        RankEnvironment.from_mapping(ME.to_mapping() | {"SYNCVAR_" + name: text})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("RANK", "8"),
        ("LOCAL_RANK", "2"),
        ("WORLD_SIZE", "0"),
        ("LOCAL_WORLD_SIZE", "0"),
        ("HOST_INDEX", "4"),
    ],
)
def test_a_rank_outside_its_world_is_refused(name, text):
    with pytest.raises(ConfigError, match="is outside"):
        RankEnvironment.from_mapping(ME.to_mapping() | {"SYNCVAR_" + name: text})
