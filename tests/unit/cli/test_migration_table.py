"""The table for people who come from other libraries: every spelling of syncvar's runs, in a world of one."""

import ast
import inspect
import shlex

import numpy as np
import pytest

import syncvar as sv
from syncvar.cli.commands import main
from syncvar.cli.printed_tables import LIBRARIES, coming_from_text, tasks
from syncvar_launcher.options.parse_options import parse

TASKS = tasks()
COMMANDS = [one.syncvar for one in TASKS if "syncvar-launch" in one.syncvar]
STARTING = "sv.run(fn, workers=4)"
CALLS = [one.syncvar for one in TASKS if one.syncvar not in (*COMMANDS, STARTING)]


@pytest.mark.parametrize("spelling", CALLS)
def test_a_spelling_runs(spelling, tmp_path):
    strategy = sv.MirroredStrategy()
    with strategy.scope():
        w = sv.Variable(np.zeros(4, np.float32), aggregation=sv.VariableAggregation.MEAN)
    ckpt = sv.Checkpoint(w=w)
    names = {
        "sv": sv,
        "strategy": strategy,
        "w": w,
        "ckpt": ckpt,
        "path": tmp_path / "saved",
        "x": np.ones(4, np.float32),
        "grads": [np.ones(4, np.float32)],
        "weights": [w],
        "step": lambda x: x + 1,
        "fn": lambda: None,
        "np": np,
    }
    result = eval(compile(ast.parse(spelling, mode="eval"), spelling, "eval"), names)
    if spelling.startswith("sv.all_reduce(grads"):
        assert isinstance(result, list)
    if "apply_gradients" in spelling:
        assert (np.asarray(w) < 0).all()
    if ".save(" in spelling:
        assert list(tmp_path.iterdir())
    if "recv_object" in spelling:
        assert result[1] == {"a": 7}
    elif "recv" in spelling:
        np.testing.assert_array_equal(result[1], names["x"])


def test_the_call_that_starts_workers_has_these_arguments():
    call = ast.parse(STARTING, mode="eval").body
    assert STARTING in [one.syncvar for one in TASKS]
    inspect.signature(sv.run).bind(None, **{word.arg: 4 for word in call.keywords})


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_understood_by_the_launcher(command, tmp_path):
    for name in ("train.py", "a.py", "b.py"):
        (tmp_path / name).write_text("")
    words = [word for word in shlex.split(command) if "=" not in word]
    assert words[0] == "syncvar-launch"
    assert parse(words[1:], {}, tmp_path).ranks.workers == 4


def test_every_row_has_five_spellings_and_says_its_task_once():
    assert len({one.title for one in TASKS}) == len(TASKS)
    for one in TASKS:
        assert one.title
        assert all(one.spellings.values())
        assert one.syncvar not in ("", "-")
        assert set(one.spellings) == set(LIBRARIES)
        assert any(spelling != "-" for spelling in one.spellings.values()) or "bits" in one.title
        assert {name for names, _ in one.notes for name in names} <= set(LIBRARIES)


@pytest.mark.parametrize("library", LIBRARIES)
def test_one_library_beside_syncvar_with_its_notes_only(library, capsys):
    assert main(["coming-from", library]) == 0
    shown = capsys.readouterr().out
    assert shown == coming_from_text(library)
    assert all(one.syncvar in shown for one in TASKS)
    for one in TASKS:
        for libraries, text in one.notes:
            assert (text in shown) is (not libraries or library in libraries)


@pytest.mark.parametrize("library", ["horovod", "torch.distributed"])
def test_who_comes_with_a_module_is_sent_to_its_section(library):
    shown = coming_from_text(library)
    assert '"A module of PyTorch" in docs/migration/torch-distributed.md' in shown
    (row,) = [line for line in shown.splitlines() if "Parallel" in line or "model.named_" in line]
    assert 'sv.all_reduce(grads, "mean", out=grads)' in row


def test_an_unknown_library_is_refused(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["coming-from", "dask"])
    assert ended.value.code == 2
    assert "tf.distribute" in capsys.readouterr().err
