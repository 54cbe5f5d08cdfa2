"""The words that people bring: each says what to write, what it says is there, and only near words are guessed at."""

import itertools
import re
import runpy

import numpy as np
import pytest

import syncvar as sv
from syncvar.cli.commands import main
from syncvar.cli.printed_tables import LIBRARIES, SHORT, coming_from_text
from syncvar.core.errors import ConfigError
from syncvar.core.migration_hints import foreign_names, hint_for, table_text
from syncvar.core.settings import nearest
from syncvar_launcher.options.option_table import BY_FLAG, BY_OFF_FLAG, OPTIONS, OTHER_FLAGS
from syncvar_launcher.options.parse_options import parse

OURS = {
    "sv": sv,
    "sv.optimizers": sv.optimizers,
    "sv.data": sv.data,
    "sv.partitioners": sv.partitioners,
    "Optimizer": sv.optimizers.SGD,
    "Strategy": sv.MirroredStrategy,
    "ReplicaContext": sv.ReplicaContext,
    "Variable": sv.Variable,
    "CheckpointManager": sv.CheckpointManager,
    "Dataset": sv.data.Dataset,
    "DistributedIterator": sv.DistributedIterator,
    "Work": sv.Work,
    "Group": sv.Group,
}
EXAMPLES = {
    "manager": sv.CheckpointManager,
    "dataset": sv.data.Dataset,
    "work": sv.Work,
    "group": sv.Group,
    "optimizer": sv.optimizers.Optimizer,
    "v": sv.Variable,
    "strategy": sv.Strategy,
    "mesh": sv.Mesh,
}
ATTRIBUTES = [
    (word.place, name)
    for word in foreign_names()
    if word.place in OURS and not word.is_accepted
    for name in word.names
]


def test_a_word_stands_in_the_table_once_and_is_none_of_ours():
    seen = [(word.place, name) for word in foreign_names() for name in word.names]
    assert len(set(seen)) == len(seen)
    for place, name in ATTRIBUTES:
        assert name not in vars(OURS[place]), f"{place} has {name} itself"
    known = {flag for option in OPTIONS for flag in option.flags}
    assert not known & {name for place, name in seen if place == "option"}


def test_what_a_word_is_told_is_there():
    """Names, methods, options and settings that the sentences speak of exist."""
    flags = {*BY_FLAG, *BY_OFF_FLAG, *OTHER_FLAGS}
    for word in foreign_names():
        for dotted in re.findall(r"\bsv((?:\.[A-Za-z_]+)+)", word.text):
            value = sv
            for part in dotted.strip(".").split("."):
                value = getattr(value, part)
        for name, part in re.findall(rf"\b({'|'.join(EXAMPLES)})\.([a-z_]+)", word.text):
            assert hasattr(EXAMPLES[name], part), word
        if "torchrun" not in word.text:
            assert set(re.findall(r"(?<!\S)--[a-z-]+", word.text)) <= flags, word


@pytest.mark.parametrize(("place", "name"), [one for one in ATTRIBUTES if one[0].startswith("sv")])
def test_a_foreign_name_of_a_module_is_explained(place, name):
    with pytest.raises(AttributeError) as raised:
        getattr(OURS[place], name)
    assert str(raised.value).endswith(f"has no attribute {name!r}: {hint_for(place, name)}")


def test_foreign_names_of_objects_are_explained(tmp_path):
    objects = {
        "Optimizer": sv.optimizers.Adam(),
        "Strategy": sv.MirroredStrategy(),
        "Variable": sv.Variable(1.0),
        "CheckpointManager": sv.CheckpointManager(sv.Checkpoint(), tmp_path),
        "Dataset": sv.data.from_arrays(np.arange(3), batch_size=1),
        "Work": sv.barrier(async_op=True),
        "Group": sv.new_group([0]),
        "DistributedIterator": iter(
            sv.get_strategy().experimental_distribute_dataset([np.ones(1)])
        ),
    }
    objects["ReplicaContext"] = objects["Strategy"].run(sv.get_replica_context)
    for place, name in ATTRIBUTES:
        if not place.startswith("sv"):
            with pytest.raises(AttributeError) as raised:
                getattr(objects[place], name)
            assert str(raised.value).endswith(f"has no attribute {name!r}: {hint_for(place, name)}")
    for one in objects.values():
        with pytest.raises(
            AttributeError, match=f"^'{type(one).__name__}' object has no attribute 'no_such_name'$"
        ):
            one.no_such_name  # noqa: B018


@pytest.mark.parametrize("name", [name for place, name in ATTRIBUTES if place == "Dataset"])
def test_a_foreign_method_of_the_class_of_datasets_is_explained(name):
    text = f"type object 'Dataset' has no attribute {name!r}: {hint_for('Dataset', name)}"
    with pytest.raises(AttributeError, match=re.escape(text)):
        getattr(sv.data.Dataset, name)
    with pytest.raises(AttributeError, match=r"^type object 'Dataset' has no attribute 'wobble'$"):
        sv.data.Dataset.wobble  # noqa: B018


@pytest.mark.parametrize("name", [name for place, name in ATTRIBUTES if place == "Optimizer"])
def test_a_foreign_attribute_of_an_optimizer_is_not_set_in_vain(name):
    optimizer = sv.optimizers.SGD(0.1)
    with pytest.raises(AttributeError, match=re.escape(hint_for("Optimizer", name))):
        setattr(optimizer, name, 0.5)
    optimizer.learning_rate = 0.5
    optimizer.comment = "of the program's own"
    assert optimizer.learning_rate == 0.5


class TFConfigClusterResolver:
    """As of tf.distribute."""


class Linear:
    """As a module of PyTorch shows itself; it can be called, as a partitioner can."""

    def named_parameters(self):
        return []

    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: sv.MirroredStrategy(["gpu:0", "gpu:1"]), "one replica is one process"),
        (lambda: sv.CentralStorageStrategy("gpu:0"), "one replica is one process"),
        (lambda: sv.MirroredStrategy([0, 1]), "write group = sv.new_group([0, 1]), on all ranks"),
        (lambda: sv.all_reduce(X, group=range(2)), "write group = sv.new_group(range(0, 2))"),
        (lambda: sv.MultiWorkerMirroredStrategy(Linear()), '"A module of PyTorch"'),
        (
            lambda: sv.MirroredStrategy(TFConfigClusterResolver()),
            "leave it out: sv reads TF_CONFIG",
        ),
        (
            lambda: sv.ParameterServerStrategy(TFConfigClusterResolver()),
            "leave it out: sv reads TF_CONFIG",
        ),
        (lambda: sv.ParameterServerStrategy(Linear()), '"A module of PyTorch"'),
        (lambda: sv.ParameterServerStrategy(3), "write sv.partitioners.FixedShards(2)"),
    ],
)
def test_what_others_give_a_strategy_is_explained(make, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        make()


def test_what_a_property_raises_is_not_covered_up():
    class Broken(sv.Group):
        @property
        def size(self):
            raise AttributeError("from the inside")

    with pytest.raises(AttributeError, match=r"^from the inside$"):
        Broken(sv.new_group([0])._communicator).size  # noqa: B018


X = np.ones(2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: sv.all_reduce(X, average=True),
            "all_reduce() got an unexpected keyword argument 'average': write op=\"mean\"",
        ),
        (lambda: sv.all_reduce(X, name="x"), "leave it out: sv identifies calls by their order"),
        (lambda: sv.all_reduce(X, tiemout=1), "'tiemout' (did you mean timeout?)"),
        (lambda: sv.all_reduce(X, zzz=1), "unexpected keyword argument 'zzz'"),
        (lambda: sv.broadcast(X, src=0), "'src': write root="),
        (lambda: sv.broadcast(X, root_rank=0), "'root_rank': write root="),
        (lambda: sv.reduce(X, dst=0), "'dst': write root="),
        (lambda: sv.gather(X, dest=0), "'dest': write root="),
        (lambda: sv.scatter([X], src=0), "'src': write root="),
        (lambda: sv.all_gather(X, process_set=1), "write group="),
        (lambda: sv.reduce_scatter(X, recvcounts=[2]), "lengths may differ"),
        (lambda: sv.all_to_all([X], splits=[2]), "lengths may differ"),
        (lambda: sv.send(X, 0, dst=0), "'dst': write dest="),
        (lambda: sv.send(X, dst=0), "missing 1 required positional argument: 'dest'"),
        (lambda: sv.recv(0, src=0), "'src': write source="),
        (lambda: sv.recv(0, buf=X), "'buf': write out="),
        (lambda: sv.run(print, np=2), "'np': write workers="),
        (
            lambda: sv.MirroredStrategy(devices=["a"]),
            "MirroredStrategy() got an unexpected keyword argument 'devices': one replica is",
        ),
        (
            lambda: sv.MultiWorkerMirroredStrategy(cluster_resolver=1),
            "sv reads TF_CONFIG and the variables",
        ),
        (lambda: sv.CentralStorageStrategy(compute_devices=[]), "one replica is one process"),
        (
            lambda: sv.optimizers.SGD(0.1, momentum=0.9),
            "write sv.optimizers.Momentum(0.1, momentum=0.9)",
        ),
        (lambda: sv.optimizers.Adam(lr=0.1), "'lr': write learning_rate="),
        (lambda: sv.optimizers.Adam(betas=(1, 2)), "write beta_1=0.9"),
        (
            lambda: sv.CheckpointManager(sv.Checkpoint(), "x", checkpoint_name="a"),
            "folders are named step-",
        ),
        (lambda: sv.data.from_arrays(X, batch_size=1, num_workers=2), "dataset.prefetch(2)"),
        (
            lambda: sv.data.from_arrays(X, batch_size=1).map(abs, num_parallel_calls=2),
            "dataset.prefetch(2)",
        ),
        (
            lambda: sv.data.from_arrays(X, batch_size=1).shuffle(reshuffle_each_iteration=True),
            "each epoch has its own order",
        ),
    ],
)
def test_a_foreign_keyword_is_explained_before_anything_is_sent(call, said):
    with pytest.raises(TypeError, match=re.escape(said)):
        call()


class Member:
    """As torch's ReduceOp.AVG and MPI.SUM of mpi4py show themselves."""

    def __init__(self, name):
        self.name = name


@pytest.mark.parametrize("op", ["average", "AVG", "Average", "avg"])
def test_an_average_is_a_mean(op):
    assert sv.all_reduce(np.array([2, 4]), op).tolist() == [2.0, 4.0]
    assert sv.all_reduce({"a": 1}, op)["a"].dtype == np.float64
    assert sv.all_reduce_shards({0: X}, op).tolist() == [1.0, 1.0]
    assert sv.get_strategy().reduce(op, X, axis=0) == 1.0
    assert sv.Variable(0.0, aggregation=op).aggregation is sv.VariableAggregation.MEAN


@pytest.mark.parametrize(
    ("op", "said"),
    [
        ("product", ': write "prod"'),
        ("BAND", ': write "and"'),
        ("MPI.SUM", ": write 'sum'"),
        ("MPI_MAX", ": write 'max'"),
        ("ReduceOp.AVG", ": write 'mean'"),
        (Member("AVG"), ": write 'mean'"),
        (Member("MPI_LAND"), ': write "and"'),
        ("summ", r" \(did you mean sum\?\)"),
        ("wobble", "not 'wobble' .SV-101.$"),
        (["sum"], r"not \['sum'\] .SV-101.$"),
        (None, "not None .SV-101.$"),
    ],
)
def test_a_foreign_op_is_explained(op, said):
    with pytest.raises(ConfigError, match="^op must be one of sum, mean, .*" + said):
        sv.all_reduce(X, op)


def test_a_foreign_reduction_of_a_strategy_is_explained():
    with pytest.raises(ConfigError, match=r"not 'ReduceOp.AVG': write 'mean' .SV-101.$"):
        sv.get_strategy().reduce("ReduceOp.AVG", X, axis=0)
    with pytest.raises(ConfigError, match=r"aggregation must be one of .*: write 'sum' .SV-101.$"):
        sv.Variable(0.0, aggregation=Member("MPI_SUM"))
    with pytest.raises(
        ConfigError, match=r"op of all_reduce_shards must be one of .*: write 'mean' .SV-101.$"
    ):
        sv.all_reduce_shards({0: X}, Member("AVG"))


def test_accepted_words(tmp_path):
    assert sv.optimizers.RMSprop is sv.optimizers.RMSProp
    checkpoint = sv.Checkpoint(v=sv.Variable(1.0))
    with sv.CheckpointManager(checkpoint, tmp_path, max_to_keep=2) as manager:
        for step in range(4):
            manager.save(step)
        assert len(manager.checkpoints) == 2
    with pytest.raises(ConfigError, match="keep=3 and max_to_keep=2 are aliases"):
        sv.CheckpointManager(checkpoint, tmp_path, 3, max_to_keep=2)
    with pytest.raises(ConfigError, match="keep must be an integer of at least 1"):
        sv.CheckpointManager(checkpoint, tmp_path, max_to_keep=0)
    accepted = {name for word in foreign_names() if word.is_accepted for name in word.names}
    assert accepted == {"RMSprop", "max_to_keep", "average", "avg", *SHORT}


@pytest.mark.parametrize("short", SHORT)
def test_short_names_of_libraries(short, capsys):
    assert SHORT[short] in LIBRARIES
    assert main(["coming-from", short]) == 0
    assert capsys.readouterr().out == coming_from_text(SHORT[short])


def test_the_package_runs_as_the_command(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["syncvar", "settings"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("syncvar", run_name="__main__")
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "SYNCVAR_KEY = (64 hexadecimal digits): secret of a job" in printed
    assert "SYNCVAR_KEY_FILE = (path): " in printed


def test_the_table_is_printed(capsys):
    assert main(["coming-from", "words"]) == 0
    assert capsys.readouterr().out == table_text()
    assert len(table_text().splitlines()) == len(foreign_names()) + 2


@pytest.mark.parametrize(
    "name",
    ["--hostfile", "--resume", "--nnodes", "--rdzv-endpoint", "--metrics", "--show-map", "--join"],
)
def test_nothing_far_is_guessed(name):
    assert (
        nearest(
            name,
            ["--workers", "--config", "--bind", "--no-verbose", "--version", "--no-timestamps"],
        )
        == ""
    )


def test_near_words_are_guessed():
    assert nearest("--worker", ["--workers", "--cwd"]) == " (did you mean --workers?)"
    with pytest.raises(AttributeError, match=r"'all_reduced' \(did you mean all_reduce\?\)$"):
        sv.all_reduced  # noqa: B018
    with pytest.raises(ConfigError, match=r"there is no algorithm 'zzz' for all_reduce\. Known: "):
        sv.all_reduce(X, algorithm="zzz")


def refused(arguments, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(arguments, {}, "/")
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_options_of_other_launchers_are_explained(capsys):
    known = [name for word in foreign_names() if word.place == "option" for name in word.names]
    for name in known:
        assert f"unknown option {name}: {hint_for('option', name)} [SV-506]\n" in refused(
            [name, "4", "train.py"], capsys
        )
    for name in ("--machinefile", "-machinefile", "-f"):
        assert "write --hostfile FILE" in refused([name, "hosts", "train.py"], capsys)
    for name in ("--nnodes", "--nnodes=2", "--rdzv-endpoint", "--rdzv_endpoint"):
        said = refused([name, "hosts", "train.py"], capsys)
        assert (
            "write --hostfile FILE, with lines such as node1 slots=4, or -H node1:4,node2:4" in said
        )
        assert "torchrun --nnodes 2 --nproc-per-node 4 --node-rank 0 --master-addr HOST" in said
        assert "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT" in said
        assert "SYNCVAR_KEY" in said
    for first, second in itertools.pairwise(["-npernode", "2", "-mca", "btl", "-map-by", "core"]):
        if first.startswith("-"):
            assert "unknown option" in refused([first, second, "train.py"], capsys)
    assert "unknown option --wobble [SV-506]\n" in refused(["--wobble", "train.py"], capsys)
    assert "unknown option --worker (did you mean --workers?)" in refused(
        ["--worker", "2", "train.py"], capsys
    )
