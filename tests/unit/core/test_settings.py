"""Every knob has a unit, words and a range; values are read from text, refused by name, and fit together."""

import math
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncvar.core.errors import ConfigError
from syncvar.core.settings import RuntimeConfig, nearest

RUNTIME_SETTINGS = {item.name: item for item in RuntimeConfig.runtime_settings()}
NUMBERS = [name for name, item in RUNTIME_SETTINGS.items() if not isinstance(item.default, str)]
WHOLE = [name for name in NUMBERS if isinstance(RUNTIME_SETTINGS[name].default, int)]


@pytest.mark.parametrize("name", RUNTIME_SETTINGS)
def test_every_knob_has_words_a_unit_in_its_name_and_a_default_that_passes(name):
    item = RUNTIME_SETTINGS[name]
    assert len(item.text) > 10
    unit = item.unit
    assert unit in ("s", "B", "runs", "path", "list", "")
    assert not unit or name.endswith(
        {
            "s": "_s",
            "B": "_bytes",
            "runs": "_every",
            "path": ("trace", "ledger", "auto_log", "auto_replay", "match_log", "match_replay"),
            "list": "algorithm",
        }[unit]
    )
    assert bool(unit) != bool(item.choices)
    RuntimeConfig(**{name: item.default})


def test_settings_do_not_change_and_are_compared_by_value():
    config = RuntimeConfig(lost_after_s=7.0)
    with pytest.raises(AttributeError, match="lost_after_s cannot be set"):
        config.lost_after_s = 8.0
    with pytest.raises(TypeError, match="there is no setting lost_after"):
        RuntimeConfig(lost_after=7.0)
    again = RuntimeConfig().replaced(lost_after_s=7.0)
    assert again == config != RuntimeConfig()
    assert hash(again) == hash(config)
    assert pickle.loads(pickle.dumps(config)) == config
    assert "lost_after_s=7.0" in repr(config)
    with pytest.raises(ConfigError, match="lost_after_s must be a number"):
        config.replaced(lost_after_s=-1)


@pytest.mark.parametrize("bad", [None, "1", True, -1, -0.001, math.nan, [1], -math.inf])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_value_that_is_no_number_in_range_is_refused_by_name(name, bad):
    with pytest.raises(ConfigError, match=f"{name} must be a "):
        RuntimeConfig(**{name: bad})


@pytest.mark.parametrize("bad", [8192.5, 1e6, math.inf])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers_are_not_given_as_fractions(name, bad):
    with pytest.raises(ConfigError, match=f"{name} must be a whole number of (B|runs)"):
        RuntimeConfig(**{name: bad})


@pytest.mark.parametrize("name", [name for name in NUMBERS if name not in WHOLE])
def test_a_time_may_be_endless_and_is_not_below_its_least(name):
    assert getattr(RuntimeConfig(**{name: math.inf}), name) == math.inf
    low = RUNTIME_SETTINGS[name].low
    assert getattr(RuntimeConfig(**{name: low}), name) == low


@pytest.mark.parametrize("text", ["", "x", "1,5", "1s", "nan", "-1"])
@pytest.mark.parametrize("name", NUMBERS)
def test_a_text_that_cannot_be_read_is_refused_by_name(name, text):
    with pytest.raises(ConfigError, match=name.upper() + "|" + name):
        RuntimeConfig.from_mapping({"SYNCVAR_" + name.upper(): text})


def test_a_choice_is_one_of_those_there_are():
    assert RuntimeConfig.from_mapping({"SYNCVAR_TRANSPORT": "zmq"}).transport == "zmq"
    with pytest.raises(
        ConfigError, match="transport must be one of auto, zmq, mpi, mpi-only, not 'carrier pigeon'"
    ):
        RuntimeConfig(transport="carrier pigeon")


def test_a_path_is_a_text():
    assert RuntimeConfig.from_mapping({"SYNCVAR_TRACE": "there"}).trace == "there"
    with pytest.raises(ConfigError, match="trace must be a text, not 3"):
        RuntimeConfig(trace=3)


def test_variables_lie_over_the_base_and_unknown_settings_get_a_hint():
    config = RuntimeConfig.from_mapping(
        {"SYNCVAR_TERM_GRACE_S": "3"}, {"term_grace_s": 1.0, "abort_grace_s": 2.5}
    )
    assert (config.term_grace_s, config.abort_grace_s) == (3.0, 2.5)
    with pytest.raises(ConfigError, match="did you mean term_grace_s"):
        RuntimeConfig.from_mapping({}, {"term_grac_s": 1.0})


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_the_variables_for_a_worker_give_the_same_settings_back(data):
    values = {}
    for name in data.draw(st.lists(st.sampled_from(NUMBERS), unique=True)):
        low = max(RUNTIME_SETTINGS[name].low, 0)
        values[name] = data.draw(
            st.integers(int(low), 1 << 40)
            if name in WHOLE
            else st.floats(low, 1e9) | st.just(math.inf)
        )
    config = RuntimeConfig(**values)
    assert RuntimeConfig.from_mapping(config.to_mapping()) == config
    assert RuntimeConfig().to_mapping() == {}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"heartbeat_interval_s": 6.0},
            "heartbeat_interval_s .6. must not exceed suspect_after_s .5.",
        ),
        (
            {"heartbeat_interval_s": 20.0, "suspect_after_s": math.inf},
            "must not exceed lost_after_s .15.",
        ),
        ({"suspect_after_s": 20.0}, "suspect_after_s .20. must not exceed lost_after_s .15."),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_both_named(values, words):
    with pytest.raises(ConfigError, match=words):
        RuntimeConfig(**values).consistent()


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"suspect_after_s": math.inf},
        {"lost_after_s": math.inf},
        {"suspect_after_s": math.inf, "lost_after_s": math.inf, "heartbeat_interval_s": 100.0},
        {"suspect_after_s": 15.0},
        {"lost_after_s": 1.5},
        {"heartbeat_interval_s": 0.1, "suspect_after_s": 0.5, "lost_after_s": 1.5},
    ],
)
def test_settings_that_fit_together_pass(values):
    assert RuntimeConfig(**values).consistent() == RuntimeConfig(**values)


def test_the_nearest_name_is_offered_and_none_that_is_far():
    assert nearest("windw_bytes", RuntimeConfig.names()) == " (did you mean window_bytes?)"
    assert nearest("zzz", RuntimeConfig.names()) == ""
