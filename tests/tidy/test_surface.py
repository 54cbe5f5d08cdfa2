"""The public names: each resolves, says what it does and has its types; the settings are complete."""

import inspect
import os
import tomllib

import pytest

import syncvar as sv
from syncvar.core.settings import RuntimeConfig
from syncvar_launcher.options.parse_options import parse
from tests.support.paths import REPOSITORY

CONFIGS = sorted((REPOSITORY / "configs").glob("*.toml"))


@pytest.mark.parametrize("name", sv.__all__)
def test_a_public_name(name):
    value = getattr(sv, name)
    documented = inspect.getdoc(value)
    assert documented, f"{name} has no docstring"
    if inspect.isfunction(value):
        check_annotations(name, value)
    if inspect.isclass(value):
        assert value.__module__.startswith("syncvar"), name
        for attribute, member in vars(value).items():
            if attribute.startswith("_"):
                continue
            function = (
                member.fget if isinstance(member, property) else getattr(member, "__func__", member)
            )
            if inspect.isfunction(function):
                check_annotations(f"{name}.{attribute}", function)
                assert inspect.getdoc(getattr(value, attribute)), (
                    f"{name}.{attribute} has no docstring"
                )


@pytest.mark.parametrize("name", sv.__all__)
def test_a_public_name_has_an_example(name):
    documented = inspect.getdoc(getattr(sv, name))
    assert "\nExample:\n    >>> " in documented, f"the docstring of {name} has no example"


def check_annotations(name, function):
    signature = inspect.signature(function)
    for parameter in list(signature.parameters.values()):
        if parameter.name not in ("self", "cls"):
            assert parameter.annotation is not inspect.Parameter.empty, (
                f"{name}: {parameter.name} has no type"
            )
    assert signature.return_annotation is not inspect.Signature.empty, f"{name} has no return type"


OF_STRATEGIES = {
    *("check_every", "communicator", "distribute_datasets_from_function", "gather", "reduce"),
    *("experimental_distribute_dataset", "experimental_distribute_values_from_function"),
    *("experimental_local_results", "num_replicas_in_sync", "replica_id", "run", "scope"),
}
OF_SERVERS = {
    *("is_chief", "read_all", "server_count", "snapshot", "staleness_counts"),
    *("tick", "transaction"),
}
OF_COORDINATORS = {"create_per_worker_dataset", "done", "fetch", "join", "schedule"}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        (sv.Strategy, OF_STRATEGIES),
        (sv.MirroredStrategy, OF_STRATEGIES),
        (sv.MultiWorkerMirroredStrategy, OF_STRATEGIES),
        (sv.CentralStorageStrategy, OF_STRATEGIES),
        (sv.ParameterServerStrategy, OF_STRATEGIES | OF_SERVERS),
        (sv.ClusterCoordinator, OF_COORDINATORS),
    ],
)
def test_help_of_a_strategy_lists_what_programs_call(kind, names):
    assert {name for name in dir(kind) if not name.startswith("_")} == names


def test_names_are_sorted_and_listed_by_dir():
    assert sorted(sv.__all__) == list(sv.__all__)
    assert set(dir(sv)) == {*sv.__all__, "__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        sv.no_such_name  # noqa: B018


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_file_of_settings_loads(path, tmp_path):
    (tmp_path / "train.py").write_text("")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SYNCVAR_")}
    chosen = parse(["--config", str(path), "train.py"], environ, tmp_path)
    document = tomllib.loads(path.read_text())
    assert set(document) <= {"launch", "runtime"}
    for key, value in document.get("runtime", {}).items():
        assert getattr(chosen.runtime, key) == value
        assert chosen.origin[key] == "file"


def test_local_toml_is_complete_and_shows_the_defaults():
    runtime = tomllib.loads((REPOSITORY / "configs" / "local.toml").read_text())["runtime"]
    assert runtime == {knob.name: knob.default for knob in RuntimeConfig.runtime_settings()}


@pytest.mark.parametrize("knob", RuntimeConfig.runtime_settings(), ids=lambda knob: knob.name)
def test_a_setting_says_what_it_is(knob):
    assert knob.text
    assert knob.unit or knob.choices
    assert knob.unit != "s" or knob.name.endswith("_s"), "the unit is the end of the name"
    assert knob.unit != "B" or knob.name.endswith("_bytes")
