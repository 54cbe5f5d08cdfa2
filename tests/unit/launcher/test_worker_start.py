"""How workers start: the decision from options and script text, and the variables that OpenBLAS would read."""

import pytest

from syncvar.bootstrap.preloaded_imports import READ_ONCE, blas_threads
from syncvar_launcher.local.worker_start import plan_start, start_early
from syncvar_launcher.options.launch_options import RankProgram


@pytest.fixture
def begin(tmp_path):
    (tmp_path / "train.py").write_text(
        "import os\nos.environ['OMP_NUM_THREADS'] = os.environ['OPENBLAS_NUM_THREADS'] = '1'\nimport numpy\n"
    )
    (tmp_path / "old.py").write_bytes(
        b"import os  # caf\xe9\nos.environ['OPENBLAS_CORETYPE'] = 'Haswell'; X_NPY_Y = 'NPY_DISABLE_CPU_FEATURES'\n"
    )
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").write_text("NUMPY_MADVISE_HUGEPAGE")
    (tmp_path / "package" / "part.py").write_text("NPY_PROMOTION_STATE")

    def decide(target="train.py", kind="script", method="auto", workers=2, **environ):
        program = RankProgram(kind, target, (), {}, workers)
        return plan_start(method, [program], workers, str(tmp_path), environ)

    return decide


def test_workers_of_a_script_are_forked_unless_something_speaks_against_it(begin, tmp_path):
    assert begin() == (True, "from one process that has imported NumPy and syncvar", True)
    assert begin(str(tmp_path / "train.py")).is_forked
    assert begin("train", "module").is_forked
    assert begin("installed.somewhere", "module").is_forked
    assert begin("missing.py").is_forked, "its own error says so"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"workers": 1}, "one worker"),
        ({"kind": "command"}, "train.py is a program of its own"),
        (
            {"target": "old.py"},
            "old.py names NPY_DISABLE_CPU_FEATURES, OPENBLAS_CORETYPE, which NumPy reads only when it is imported",
        ),
        ({"target": "package"}, "package names NUMPY_MADVISE_HUGEPAGE"),
        ({"target": "package", "kind": "module"}, "package names NUMPY_MADVISE_HUGEPAGE"),
        ({"target": "package.part", "kind": "module"}, "package.part names NPY_PROMOTION_STATE"),
        (
            {"PYTHONPROFILEIMPORTTIME": "1"},
            "PYTHONPROFILEIMPORTTIME shows what each worker imports",
        ),
        ({"method": "spawn"}, "--start-method spawn"),
    ],
    ids=str,
)
def test_workers_are_fresh_where_forked_ones_would_lack_something(begin, given, why):
    decided = begin(**given)
    assert not decided.is_forked
    assert decided.reason.startswith(why)
    assert str(decided) == f"fresh processes: {decided.reason}"
    assert begin(**{**given, "method": "fork"}) == (True, "--start-method fork", False), (
        "who asks for it gets it"
    )


def test_variables_that_can_be_set_later_are_not_read_once():
    named = "OMP_NUM_THREADS OPENBLAS_NUM_THREADS GOTO_NUM_THREADS MY_NPY_X OPENBLAS_NUM_THREADS_X OPENBLAS_MAIN_FREE"
    assert READ_ONCE.findall(named) == ["OPENBLAS_NUM_THREADS_X", "OPENBLAS_MAIN_FREE"]


@pytest.mark.parametrize(
    ("environ", "threads"),
    [
        ({}, 4),
        ({"OMP_NUM_THREADS": "3"}, 3),
        ({"OMP_NUM_THREADS": "9"}, 4),
        ({"OMP_NUM_THREADS": "3,1"}, 3),
        ({"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "3"}, 2),
        ({"OPENBLAS_NUM_THREADS": "0", "GOTO_NUM_THREADS": "1", "OMP_NUM_THREADS": "3"}, 1),
        ({"OPENBLAS_NUM_THREADS": "-2", "OMP_NUM_THREADS": "many"}, 4),
        ({"OPENBLAS_NUM_THREADS": " +2x"}, 2),
    ],
    ids=str,
)
def test_threads_are_those_that_openblas_takes(environ, threads):
    assert blas_threads(environ, 4) == threads


@pytest.mark.parametrize(
    ("arguments", "environ"),
    [
        ([], {}),
        (["--version"], {}),
        (["-n", "2", "--start-method=spawn", "train.py"], {}),
        (["-n", "2", "train.py"], {"PYTHONVERBOSE": "1"}),
        (["-n", "2", "train.py"], {"PYTHONPROFILEIMPORTTIME": "1"}),
        (["-n", "2", "train.py"], {"SYNCVAR_PASS_FDS": "7"}),
    ],
)
def test_nothing_is_started_ahead_that_would_show_or_lack_something(arguments, environ):
    assert start_early(arguments, environ) is None


@pytest.mark.parametrize(
    ("targets", "variables", "reason"),
    [
        (("train.py", "old.py"), {}, "old.py names NPY_DISABLE_CPU_FEATURES, OPENBLAS_CORETYPE, "),
        (("train.py", "package/part.py"), {}, "package/part.py names NPY_PROMOTION_STATE, "),
        (("train.py", "package/empty.py"), {}, "the programs are in different folders"),
        (("train.py", "other.py"), {"PYTHONUTF8": "1"}, "the programs differ in PYTHONUTF8, "),
        (("train.py", "other.py"), {"NPY_X": "1"}, "the programs differ in NPY_X, "),
        (("train.py", "other.py"), {"PYTHONVERBOSE": "1"}, "PYTHONVERBOSE shows what "),
        (("train.py", "other.py"), {"OMP_NUM_THREADS": "1", "OWN": "2"}, ""),
    ],
)
def test_programs_are_forked_from_one_process_if_it_can_serve_all(
    begin, tmp_path, targets, variables, reason
):
    (tmp_path / "other.py").write_text("")
    (tmp_path / "package" / "empty.py").write_text("")
    first = RankProgram("script", targets[0], (), {"A": "1"}, 1)
    second = RankProgram("script", targets[1], (), {"A": "1", **variables}, 1)
    chosen = plan_start("auto", [first, second], 2, str(tmp_path), {})
    assert chosen.is_forked == (not reason)
    assert chosen.reason.startswith(reason)
    module = RankProgram("module", "other", (), {}, 1)
    assert plan_start("auto", [first, module], 2, str(tmp_path), {}).is_forked
    command = RankProgram("command", "sh", (), {}, 1)
    assert not plan_start("auto", [first, command], 2, str(tmp_path), {}).is_forked
