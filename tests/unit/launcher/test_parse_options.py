import math
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from syncvar.core.errors import ConfigError
from syncvar.core.settings import RuntimeConfig
from syncvar_launcher.hosts.host_checks import HostCapacity, place_workers
from syncvar_launcher.options import option_table
from syncvar_launcher.options.command_line import help_text, hosts_help_text
from syncvar_launcher.options.option_table import BY_KEY, HOSTS, OPTIONS, parse_signals
from syncvar_launcher.options.parse_options import parse
from syncvar_launcher.options.worker_environment import inherited_variables
from tests.support.paths import CONFIGS, GOLDEN

HOST_KEYS = {key for key, option in BY_KEY.items() if option.group == HOSTS}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text("")
    return tmp_path


def run(*argv, environ=None, cwd="/"):
    return parse(argv, environ or {}, cwd)


def usage_error(capsys, *argv, cwd="/"):
    with pytest.raises(SystemExit) as caught:
        run(*argv, cwd=cwd)
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert text.startswith("syncvar-launch: ")
    assert text.endswith("\nSee syncvar-launch --help.\n")
    return text.splitlines()[0].removeprefix("syncvar-launch: ")


def configuration(folder, text):
    path = folder / "job.toml"
    path.write_text(text)
    return path


# What is run, and where our options end.


def test_defaults(folder):
    options = run("train.py", cwd=folder)
    assert (options.program.kind, options.program.target, options.program.args) == (
        "script",
        "train.py",
        (),
    )
    assert (
        options.ranks.workers,
        options.output.selection,
        options.ranks.bind,
        options.output.color,
    ) == (
        1,
        "all",
        "auto",
        "auto",
    )
    assert options.limits.timeout_s == math.inf
    assert options.runtime == RuntimeConfig()
    assert options.program.cwd == folder
    assert (
        options.output.log_dir
        is options.ranks.debug
        is options.program.config
        is options.ranks.cores_per_worker
        is None
    )
    assert {
        options.output.timestamps,
        options.ranks.torch_env,
        options.program.dry_run,
        options.output.verbose,
    } == {False}
    assert set(options.origin.values()) == {"default"}
    assert set(options.origin) == {*BY_KEY, "config", "join", *RuntimeConfig.names()}


@pytest.mark.parametrize(
    ("argv", "kind", "target", "args"),
    [
        (
            ["train.py", "-n", "9", "--help", "--"],
            "script",
            "train.py",
            ("-n", "9", "--help", "--"),
        ),
        (["--", "train.py", "--", "-v"], "script", "train.py", ("--", "-v")),
        (["-m", "pkg.mod", "-m", "x", "--version"], "module", "pkg.mod", ("-m", "x", "--version")),
        (["-mpkg.mod", "--workers", "x"], "module", "pkg.mod", ("--workers", "x")),
        (["--no-python", "sh", "-c", "exit 3"], "command", "sh", ("-c", "exit 3")),
        (["--no-python", "--", "-odd", "-n"], "command", "-odd", ("-n",)),
    ],
)
def test_everything_after_the_program_is_passed_on(folder, argv, kind, target, args):
    options = run("-n", "2", *argv, cwd=folder)
    assert (
        options.program.kind,
        options.program.target,
        options.program.args,
        options.ranks.workers,
    ) == (kind, target, args, 2)


def test_a_colon_begins_another_program(folder):
    options = run(
        *("-n", "3", "-x", "A=1", "--timeout", "9", "train.py", "-n", "7", "\\:", "\\\\:", "a:b"),
        *(
            ":",
            "--workers",
            "2",
            "-x",
            "A=2",
            "-x",
            "HOME",
            "-m",
            "other",
            ":",
            "--no-python",
            "sh",
        ),
        environ={"SYNCVAR_LAUNCH_ENV": "A=0 B=0", "HOME": "/h", "SYNCVAR_LAUNCH_WORKERS": "9"},
        cwd=folder,
    )
    assert options.ranks.workers == 6
    assert options.programs == (
        ("script", "train.py", ("-n", "7", ":", "\\:", "a:b"), {"A": "1", "B": "0"}, 3),
        ("module", "other", (), {"A": "2", "B": "0", "HOME": "/h"}, 2),
        ("command", "sh", (), {"A": "0", "B": "0"}, 1),
    )
    assert [one.label for one in options.programs] == ["train.py", "-m other", "sh"]


def test_without_a_colon_there_is_one_program():
    options = run("-n", "2", "-x", "A=1", "-m", "train", "-v")
    assert options.programs == (("module", "train", ("-v",), {"A": "1"}, 2),)


@pytest.mark.parametrize(
    "option", [*OPTIONS, "--no-env-clear"], ids=lambda one: getattr(one, "key", one)
)
def test_options_of_the_job_stand_before_the_first_program(capsys, option):
    if option in (BY_KEY["workers"], BY_KEY["env"]):
        return
    words = [option] if isinstance(option, str) else [option.flags[-1]]
    if not isinstance(option, str) and not option.is_switch:
        values = {"stats": "yes", "color": "never", "bind": "none", "allocation": "off"}
        words[0] += f"={values.get(option.key) or (option.choices or ('1',))[0]}"
        words[0] = words[0].replace("forward-signals=1", "forward-signals=none")
    text = usage_error(capsys, "-m", "a", ":", *words, "-m", "b")
    flag = words[0].partition("=")[0].replace("--no-", "--")
    assert text == (
        f"{flag} stands after ':', and it concerns the whole job: give it before the first program "
        "[SV-506]"
    )


@pytest.mark.parametrize(
    "argv",
    [["-m", "a", ":"], [":", "-m", "a"], ["-m", "a", ":", ":", "-m", "b"], ["-m", "a", ":", "-m"]],
)
def test_each_part_has_a_program(capsys, argv):
    text = usage_error(capsys, *argv)
    assert "before and after each ':'" in text or text.startswith("-m needs")
    assert r"for an argument that is a colon write '\:'" in text


def test_scripts_of_all_parts_are_looked_for(capsys, folder):
    assert "no script trian.py" in usage_error(capsys, "train.py", ":", "trian.py", cwd=folder)


def test_options_count_the_ranks_of_all_programs():
    assert run("-n", "2", "--output", "3", "--debug", "4", "-m", "a", ":", "-n", "3", "-m", "b")
    with pytest.raises(ConfigError, match=r"--debug 5: there is no such rank among 5"):
        run("-n", "2", "--debug", "5", "-m", "a", ":", "-n", "3", "-m", "b")
    with pytest.raises(ConfigError, match=r"the programs have 65538 ranks together"):
        run("-n", "65536", "-m", "a", ":", "-n", "2", "-m", "b")
    with pytest.raises(ConfigError, match=r"--start-method fork: sh is a program of its own"):
        run("--start-method", "fork", "-m", "a", ":", "--no-python", "sh")


def test_on_hosts_the_first_program_takes_the_slots_that_the_others_leave():
    options = run("-H", "a:3", "-m", "a", ":", "-n", "2", "-m", "b")
    assert (options.ranks.workers, options.programs[0].workers) == (0, 0)
    assert [one.workers for one in options.with_workers(3).programs] == [1, 2]
    with pytest.raises(ConfigError, match="the hosts have 2 slots, and the programs after "):
        options.with_workers(2)
    known = run("-H", "a:3", "-n", "1", "-m", "a", ":", "-n", "2", "-m", "b")
    assert [one.workers for one in known.programs] == [1, 2]


@pytest.mark.parametrize(
    "spelling",
    [
        ["--workers", "3"],
        ["--workers=3"],
        ["-n", "3"],
        ["-n3"],
        ["-n=3"],
        ["-np", "3"],
        ["--nproc-per-node", "3"],
        ["--nproc-per-node=3"],
    ],
)
def test_spellings_of_workers(spelling):
    assert run(*spelling, "-m", "x").ranks.workers == 3


def test_workers_auto_counts_usable_cores(monkeypatch, tmp_path):
    monkeypatch.setattr(option_table.os, "sched_getaffinity", lambda pid: {3, 1, 8})
    monkeypatch.setattr(option_table, "core_quota", lambda: None)
    assert run("-n", "auto", "-m", "x").ranks.workers == 3
    assert run("-m", "x", environ={"SYNCVAR_LAUNCH_WORKERS": "auto"}).ranks.workers == 3
    path = configuration(tmp_path, '[launch]\nworkers = "auto"\n')
    assert run("--config", str(path), "-m", "x").ranks.workers == 3


def test_last_value_wins():
    assert run("-n", "3", "-n", "4", "-m", "x").ranks.workers == 4
    assert run("--timestamps", "--no-timestamps", "-m", "x").output.timestamps is False


def test_all_options_together(folder):
    options = run(
        "--env",
        "A=1=2",
        "--env",
        "B",
        "--env=C=",
        "--cwd",
        str(folder),
        "--log-dir",
        "logs",
        "--output",
        "failed",
        "--timestamps",
        "--color",
        "always",
        "--timeout",
        "1.5",
        "--start-timeout",
        "7",
        "--grace",
        "0",
        "--bind",
        "cores",
        "--cores-per-worker",
        "2",
        "--torch-env",
        "--debug",
        "1",
        "-n",
        "2",
        "--dry-run",
        "-v",
        "train.py",
        environ={"B": "b b"},
    )
    assert options.program.env == {"A": "1=2", "B": "b b", "C": ""}
    assert (options.program.cwd, options.output.log_dir) == (folder, Path("/logs"))
    assert (
        options.output.selection,
        options.output.timestamps,
        options.output.color,
        options.limits.timeout_s,
    ) == (
        "failed",
        True,
        "always",
        1.5,
    )
    assert (options.runtime.rendezvous_timeout_s, options.runtime.term_grace_s) == (7, 0)
    assert (
        options.ranks.bind,
        options.ranks.cores_per_worker,
        options.ranks.torch_env,
        options.ranks.debug,
    ) == (
        "cores",
        2,
        True,
        1,
    )
    assert options.program.dry_run
    assert options.output.verbose
    assert options.origin["env.B"] == options.origin["term_grace_s"] == "command line"


# Wrong command lines.


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "nothing to run: give a script, -m module or --no-python command"),
        (["-m"], "-m needs the name of a module"),
        (["--no-python"], "--no-python needs a command"),
        (["--worker", "3"], "unknown option --worker (did you mean --workers?)"),
        (["--no-pyton", "x"], "unknown option --no-pyton (did you mean --no-python?)"),
        (["--timestamp=1"], "unknown option --timestamp (did you mean --timestamps?)"),
        (["--timestamps=1", "-m", "x"], "--timestamps takes no value"),
        (["-n"], "-n needs a value: -n N|MIN:MAX"),
    ],
)
def test_usage_errors(capsys, argv, message):
    assert usage_error(capsys, *argv) == f"{message} [SV-506]"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--workers", "0", "must be auto, MIN:MAX or a whole number of at least 1, not '0'"),
        ("--workers", "-1", "must be auto, MIN:MAX or a whole number of at least 1, not '-1'"),
        ("--workers", "2.0", "must be auto, MIN:MAX or a whole number of at least 1, not '2.0'"),
        (
            "--workers",
            "train.py",
            "must be auto, MIN:MAX or a whole number of at least 1, not 'train.py'",
        ),
        (
            "--workers",
            "\u0663",
            "must be auto, MIN:MAX or a whole number of at least 1, not '\u0663'",
        ),
        (
            "--workers",
            "1000000000",
            "must be auto, MIN:MAX or a whole number of at most 65536, not '1000000000'",
        ),
        ("--workers", "9" * 50, "must be auto, MIN:MAX or a whole number of at most 65536, not"),
        ("--debug", "-1", "must be a whole number of at least 0, not '-1'"),
        ("--cores-per-worker", "0", "must be a whole number of at least 1, not '0'"),
        ("--timeout", "0", "must be seconds above 0, not '0'"),
        ("--timeout", "nan", "must be seconds above 0, not 'nan'"),
        ("--timeout", "5m", "must be seconds above 0, not '5m'"),
        ("--grace", "-1", "must be seconds of at least 0, not '-1'"),
        (
            "--output",
            "fail",
            "must be one of all, first, failed, none, or ranks such as 0,3-5, not 'fail' (did you mean failed?)",
        ),
        ("--output", "0,x", "'x' is no rank, such as 3, and no span of ranks, such as 0-3"),
        ("--output", "0,", "'' is no rank"),
        ("--output", "-1", "or ranks such as 0,3-5, not '-1'"),
        ("--output", "0-1-2", "'0-1-2' is no rank"),
        ("--output", "3-1", "the span 3-1 ends before it begins"),
        ("--output", "0-" + "9" * 99, "there is no rank 999"),
        (
            "--forward-signals",
            "USR3",
            "'USR3' is no signal: give names or numbers, such as USR1,USR2,CONT, or none",
        ),
        ("--forward-signals", "", "'' is no signal"),
        ("--forward-signals", "USR1,none", "'none' is no signal"),
        ("--forward-signals", "0", "'0' is no signal"),
        ("--forward-signals", "65", "'65' is no signal"),
        ("--forward-signals", "-1", "'-1' is no signal"),
        ("--forward-signals", "KILL", "SIGKILL cannot be passed on: no process can handle it"),
        ("--forward-signals", "19", "SIGSTOP cannot be passed on: no process can handle it"),
        ("--forward-signals", "USR1,TERM", "SIGTERM cannot be passed on: it ends the job"),
        ("--forward-signals", "chld", "SIGCHLD cannot be passed on: the system reports with it"),
        (
            "--forward-signals",
            "49",
            "49 cannot be passed on: a rank writes its Python stack when it gets it",
        ),
        ("--forward-signals", "SEGV", "SIGSEGV cannot be passed on: it reports a fault"),
        ("--bind", "core", "must be one of auto, none, cores, not 'core' (did you mean cores?)"),
        ("--color", "on", "must be one of auto, always, never, not 'on'"),
        ("--env", "1A=2", "'1A' is not a variable name (letters, digits and _, no digit first)"),
        (
            "--env",
            "BASH_FUNC_x%%=1",
            "'BASH_FUNC_x%%' is not a variable name (letters, digits and _, no digit first)",
        ),
        ("-x", "*", "'*' is not a prefix of variable names"),
        ("-x", "A*B", "'A*B' is not a variable name"),
        ("-x", "A*=1", "'A*' is not a variable name"),
        ("--env", "=2", "'' is not a variable name (letters, digits and _, no digit first)"),
        ("--env", "SYNCVAR_RANK=1", "SYNCVAR_RANK is set by the launcher, for each rank its own"),
        ("--env", "WORLD_SIZE=1", "WORLD_SIZE is set by the launcher, for each rank its own"),
        ("--env", "SYNCVAR_TRANSPORT=zmq", "SYNCVAR_TRANSPORT is a setting of the whole job"),
        ("--cwd", "", "must be a path, not ''"),
    ],
)
def test_bad_values_on_the_command_line(capsys, option, value, message):
    assert message in usage_error(capsys, option, value, "-m", "x")


def test_a_missing_script_names_the_nearest_file(capsys, folder):
    assert "there is no script tarin.py" in usage_error(capsys, "tarin.py", cwd=folder)
    assert "(did you mean train.py?)" in usage_error(capsys, "tarin.py", cwd=folder)
    assert "there is no script nowhere/x.py" in usage_error(capsys, "nowhere/x.py", cwd=folder)


@pytest.mark.parametrize("python", ["python", "python3", "python3.11", "pypy3", sys.executable])
def test_python_before_the_script_is_left_out(capsys, folder, python):
    text = usage_error(capsys, "-np", "2", python, "train.py", cwd=folder)
    assert f"leave out {python}, because the launcher starts Python by itself" in text
    (folder / "python").write_text("print('a script of this name')\n")
    assert parse(["python"], {}, folder).program.target == "python"


def test_the_script_is_looked_for_in_the_folder_of_the_ranks(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "deep.py").write_text("")
    assert run("--cwd", "sub", "deep.py", cwd=folder).program.cwd == folder / "sub"


# Wrong configuration.


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"SYNCVAR_LAUNCH_WORKERS": "many"},
            "SYNCVAR_LAUNCH_WORKERS: must be auto, MIN:MAX or a whole number",
        ),
        (
            {"SYNCVAR_LAUNCH_WORKER": "2"},
            r"unknown variable SYNCVAR_LAUNCH_WORKER \(did you mean SYNCVAR_LAUNCH_WORKERS\?\)",
        ),
        ({"SYNCVAR_LAUNCH_GRACE": "2"}, "it sets term_grace_s, which is SYNCVAR_TERM_GRACE_S"),
        ({"SYNCVAR_LAUNCH_DRY_RUN": "perhaps"}, "SYNCVAR_LAUNCH_DRY_RUN: must be true or false"),
        ({"SYNCVAR_LAUNCH_ENV": "A='"}, "SYNCVAR_LAUNCH_ENV: cannot be read as NAME=value words"),
        ({"SYNCVAR_LAUNCH_CWD": "/no/such/folder"}, "there is no such folder"),
        ({"SYNCVAR_LAUNCH_CONFIG": "/no/such.toml"}, "cannot read /no/such.toml: No such file"),
        ({"SYNCVAR_LOST_AFTER_S": "soon"}, "SYNCVAR_LOST_AFTER_S"),
        ({"SYNCVAR_LOST_AFTER_S": "-1"}, "SYNCVAR_LOST_AFTER_S: lost_after_s must be a number"),
        ({"SYNCVAR_TRANSPORT": "tcp"}, "SYNCVAR_TRANSPORT: transport must be one of"),
    ],
)
def test_bad_variables(environ, message):
    with pytest.raises(ConfigError, match=message):
        run("-m", "x", environ=environ)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[lunch]\n", "unknown table [lunch] (did you mean launch?)"),
        ("workers = 2\n", "unknown table [workers]"),
        ("launch = 2\n", "launch must be a table"),
        ("[launch]\nworker = 2\n", "unknown key 'worker' in [launch] (did you mean workers?)"),
        (
            "[launch]\nlost_after_s = 2\n",
            "unknown key 'lost_after_s' in [launch]: it belongs to [runtime]",
        ),
        (
            "[launch]\ngrace = 2\n",
            "unknown key 'grace' in [launch]: it sets term_grace_s, which is SYNCVAR_TERM_GRACE_S or a key of [runtime]",
        ),
        ("[launch]\nconfig = 'x'\n", "unknown key 'config' in [launch]"),
        ("[launch]\nscript = 'x'\n", "unknown key 'script' in [launch]"),
        (
            "[launch]\nworkers = '2'\n",
            "workers in [launch]: must be auto, MIN:MAX or a whole number of at least 1, not '2'",
        ),
        (
            "[launch]\nworkers = true\n",
            "workers in [launch]: must be auto, MIN:MAX or a whole number of at least 1, not True",
        ),
        ("[launch]\ntimeout = '2'\n", "timeout in [launch]: must be seconds above 0, not '2'"),
        ("[launch]\ntimestamps = 1\n", "timestamps in [launch]: must be true or false, not 1"),
        (
            "[launch]\noutput = []\n",
            "output in [launch]: must be one of all, first, failed, none, or ranks such as 0,3-5, not []",
        ),
        (
            "[launch]\nforward_signals = 10\n",
            "must be names of signals, such as 'USR1,USR2,CONT', or 'none', not 10",
        ),
        ("[launch]\ncwd = 3\n", "cwd in [launch]: must be a path, not 3"),
        (
            "[launch]\nenv = 'A=1'\n",
            'env in [launch]: must be a list such as ["NAME=value", "NAME"], not \'A=1\'',
        ),
        ("[launch]\nenv = ['A=\\u0000']\n", None),
        ('[launch]\nenv = ["A=\\u0000"]\n', "the value of A has a zero byte"),
        (
            "[runtime]\nlost_after = 2\n",
            "unknown key 'lost_after' in [runtime] (did you mean lost_after_s?)",
        ),
        ("[runtime]\nworkers = 2\n", "unknown key 'workers' in [runtime]: it belongs to [launch]"),
        (
            "[runtime]\nlost_after_s = -2\n",
            "[runtime]: lost_after_s must be a number of at least 0 s, not -2",
        ),
        (
            "[runtime]\nwindow_bytes = 1e6\n",
            "[runtime]: window_bytes must be a whole number, not 1000000.0",
        ),
        ("[runtime\n", "at line 1"),
    ],
)
def test_bad_files_name_file_key_and_nearest_name(folder, text, message):
    path = configuration(folder, text)
    if message is None:
        assert run("--config", str(path), "-m", "x").program.env == {"A": "\\u0000"}
        return
    with pytest.raises(ConfigError) as caught:
        run("--config", str(path), "-m", "x")
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_a_file_that_is_no_text(folder):
    path = folder / "job.toml"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        run("--config", str(path), "-m", "x")


def test_variables_are_copied_by_name_and_by_their_beginning():
    environ = {
        "AWS_ID": "a",
        "AWS_KEY": "b",
        "OTHER": "c",
        "LD_PRELOAD": "d",
        "LD_X": "e",
        "SYNCVAR_KEY": "f",
        "SYNCVAR_MINE": "g",
    }
    options = run(
        "-x",
        "AWS_*",
        "-xOTHER",
        "-x=AWS_ID=z",
        "--env",
        "LD_*",
        "-x",
        "SYNCVAR_*",
        "-m",
        "x",
        environ=environ,
    )
    assert options.program.env == {
        "AWS_ID": "z",
        "AWS_KEY": "b",
        "OTHER": "c",
        "LD_X": "e",
        "SYNCVAR_MINE": "g",
    }
    assert run("-x", "LD_PRELOAD", "-m", "x", environ=environ).program.env == {"LD_PRELOAD": "d"}, (
        "named explicitly"
    )
    with pytest.raises(
        ConfigError,
        match=r"--env GCP_\* \(command line\): syncvar-launch has no variable to copy whose name begins with GCP_",
    ):
        run("-x", "GCP_*", "-m", "x", environ=environ)
    assert (run("-m", "x").program.env_clear, run("--env-clear", "-m", "x").program.env_clear) == (
        False,
        True,
    )


def test_what_a_worker_inherits():
    words = (
        "PATH HOME LANG LC_TIME TERM TZ USER LOGNAME SHELL PYTHONPATH VIRTUAL_ENV LD_LIBRARY_PATH OMP_NUM_THREADS SYNCVAR_LOST_AFTER_S",
        "AWS_SECRET_ACCESS_KEY LD_PRELOAD PYTHONSTARTUP BASH_FUNC_x%% SSH_AUTH_SOCK PATH_OF_MINE SYNCVAR_MINE",
        "SYNCVAR_KEY SYNCVAR_KEY_FD SYNCVAR_STATUS_FD SYNCVAR_PROCESS SYNCVAR_PASS_FDS SYNCVAR_PARENT_FD SYNCVAR_OUTCOME_FILE",
    )
    kept, more, never = (dict.fromkeys(names.split(), "1") for names in words)
    assert inherited_variables({**kept, **more, **never}, is_clear=False) == {**kept, **more}
    assert inherited_variables({**kept, **more, **never}, is_clear=True) == kept


def test_a_variable_that_is_not_there_cannot_be_copied():
    with pytest.raises(
        ConfigError, match=r"--env NOPE \(command line\): syncvar-launch has no variable NOPE"
    ):
        run("--env", "NOPE", "-m", "x")


@pytest.mark.parametrize(("workers", "ranks"), [(1, "the only rank is 0"), (4, "ranks are 0 to 3")])
def test_debug_needs_a_rank_of_the_world(workers, ranks):
    with pytest.raises(ConfigError, match=ranks):
        run("-n", str(workers), "--debug", "4", "-m", "x")


def test_output_of_ranks_needs_ranks_of_the_world(folder):
    for which in ("all", "first", "failed", "none", "0", "3,0-1", "0-3"):
        assert run("-n", "4", "--output", which, "-m", "x").output.selection == which
    with pytest.raises(
        ConfigError,
        match=r"--output 0,4 \(command line\): there is no rank 4 among 4 \(ranks are 0 to 3\)",
    ):
        run("-n", "4", "--output", "0,4", "-m", "x")
    path = configuration(folder, '[launch]\noutput = "0-7"\n')
    with pytest.raises(
        ConfigError,
        match=r"--output 0-7 \(file\): there is no rank 7 among 1 \(the only rank is 0\)",
    ):
        run("--config", str(path), "-m", "x")


# Layers.


def test_each_layer_overrules_those_below_and_origin_tells(folder):
    path = configuration(
        folder,
        """
        [launch]
        workers = 2
        output = "first"
        log_dir = "from_file"
        [runtime]
        lost_after_s = 3
        term_grace_s = 4
        suspect_after_s = 1
        """,
    )
    environ = {
        "SYNCVAR_LAUNCH_CONFIG": str(path),
        "SYNCVAR_LAUNCH_OUTPUT": "none",
        "SYNCVAR_LAUNCH_WORKERS": "3",
        "SYNCVAR_LOST_AFTER_S": "5",
        "SYNCVAR_TERM_GRACE_S": "6",
    }
    options = run("-n", "4", "--grace", "7", "-m", "x", environ=environ, cwd=folder)
    assert (options.ranks.workers, options.output.selection, options.output.log_dir) == (
        4,
        "none",
        folder / "from_file",
    )
    assert (
        options.runtime.term_grace_s,
        options.runtime.lost_after_s,
        options.runtime.suspect_after_s,
    ) == (7, 5, 1)
    assert options.program.config == path
    origin = options.origin
    assert origin["workers"] == origin["term_grace_s"] == "command line"
    assert origin["output"] == origin["lost_after_s"] == origin["config"] == "environment"
    assert origin["log_dir"] == origin["suspect_after_s"] == "file"
    assert origin["bind"] == origin["transport"] == "default"


def test_the_command_line_names_the_file_first(folder):
    path = configuration(folder, "[launch]\nworkers = 2\n")
    assert (
        run(
            "--config", "job.toml", "-m", "x", environ={"SYNCVAR_LAUNCH_CONFIG": "/no"}, cwd=folder
        ).program.config
        == path
    )


def test_variables_of_all_layers_are_joined_by_name(folder):
    path = configuration(folder, '[launch]\nenv = ["A=file", "B=file", "C=file x"]\n')
    environ = {"SYNCVAR_LAUNCH_ENV": "B=environment 'D=two words'"}
    options = run("--config", str(path), "--env", "A=line x", "-m", "x", environ=environ)
    assert options.program.env == {
        "A": "line x",
        "B": "environment",
        "C": "file x",
        "D": "two words",
    }
    assert [options.origin[f"env.{name}"] for name in "ABCD"] == [
        "command line",
        "environment",
        "file",
        "environment",
    ]


def test_a_switch_of_the_file_can_be_turned_off(folder):
    path = configuration(folder, "[launch]\ntimestamps = true\n")
    assert run("--config", str(path), "-m", "x").output.timestamps is True
    assert run("--config", str(path), "--no-timestamps", "-m", "x").output.timestamps is False
    assert (
        run(
            "--config", str(path), "-m", "x", environ={"SYNCVAR_LAUNCH_TIMESTAMPS": "off"}
        ).output.timestamps
        is False
    )


@pytest.mark.parametrize(
    ("argv", "environ", "color", "origin"),
    [
        ([], {"NO_COLOR": "1"}, "never", "environment"),
        ([], {"NO_COLOR": ""}, "auto", "default"),
        ([], {"FORCE_COLOR": "1"}, "always", "environment"),
        ([], {"FORCE_COLOR": "0"}, "auto", "default"),
        ([], {"NO_COLOR": "1", "FORCE_COLOR": "1"}, "never", "environment"),
        (["--color", "always"], {"NO_COLOR": "1"}, "always", "command line"),
        (["--color", "auto"], {"FORCE_COLOR": "1"}, "auto", "command line"),
        ([], {"NO_COLOR": "1", "SYNCVAR_LAUNCH_COLOR": "always"}, "always", "environment"),
    ],
)
def test_habits_of_colour(argv, environ, color, origin):
    options = run(*argv, "-m", "x", environ=environ)
    assert (options.output.color, options.origin["color"]) == (color, origin)


def test_color_on():
    assert [
        run("--color", when, "-m", "x").output.has_color(is_terminal=on)
        for when in ("auto", "always", "never")
        for on in (False, True)
    ] == [
        False,
        True,
        True,
        True,
        False,
        False,
    ]


def test_debug_makes_deadlines_endless_that_nobody_set_as_near():
    options = run(
        "-n",
        "2",
        "--debug",
        "1",
        "--start-timeout",
        "9",
        "-m",
        "x",
        environ={"SYNCVAR_LOST_AFTER_S": "8"},
    )
    assert options.runtime.collective_timeout_s == options.runtime.lost_after_s == math.inf
    assert options.runtime.rendezvous_timeout_s == 9
    assert options.runtime.term_grace_s == RuntimeConfig().term_grace_s
    assert options.origin["collective_timeout_s"] == "command line"
    options = run("-m", "x", environ={"SYNCVAR_LAUNCH_DEBUG": "0", "SYNCVAR_LOST_AFTER_S": "8"})
    assert (options.runtime.lost_after_s, options.runtime.collective_timeout_s) == (8, math.inf)


# Help.


def test_help_is_as_agreed():
    golden = GOLDEN / "launch_help.txt"
    assert help_text() == golden.read_text(encoding="utf-8")


def test_help_fits_a_screen_and_begins_with_three_examples():
    lines = help_text().splitlines()
    assert len(lines) <= 50
    assert max(map(len, lines)) <= 80
    assert lines[0] == "Examples:"
    assert sum(line.startswith("  syncvar-launch ") for line in lines[1:4]) == 3
    assert "!" not in help_text()


def test_help_for_several_hosts_fits_a_screen():
    lines = hosts_help_text().splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) <= 88
    for key in HOST_KEYS:
        assert f"--{key.replace('_', '-')}" in hosts_help_text()


def test_help_names_every_option():
    text = help_text() + hosts_help_text()
    for key in BY_KEY:
        assert f"--{key.replace('_', '-')}" in text


@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_help_goes_to_standard_output(capsys, flag):
    with pytest.raises(SystemExit) as caught:
        run("-n", "2", flag)
    assert caught.value.code == 0
    assert capsys.readouterr().out == help_text()


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        run("--version")
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("syncvar-launch ")


# Files in configs/.


@pytest.mark.parametrize("name", ["local", "ci", "debug", "parameter_server"])
def test_files_of_the_repository_load(name):
    assert (
        run("--config", str(CONFIGS / f"{name}.toml"), "-m", "x").program.config
        == CONFIGS / f"{name}.toml"
    )


def test_local_holds_every_option_and_knob_with_its_default():
    text = (CONFIGS / "local.toml").read_text(encoding="utf-8")
    launch, runtime = text.split("\n[runtime]\n")
    several = (CONFIGS / "two_hosts.toml").read_text(encoding="utf-8")
    for key in BY_KEY:
        assert re.search(
            rf"^(# )?{key} = ", several if key in HOST_KEYS else launch, re.MULTILINE
        ), key
    for item in RuntimeConfig.runtime_settings():
        assert re.search(rf"^# .+\n{item.name} = ", runtime, re.MULTILINE), item.name
        if item.unit in ("s", "B"):
            assert re.search(
                rf"^# .+ in (seconds|bytes)\.\n{item.name} = ", runtime, re.MULTILINE
            ), item.name
    with_file = run("--config", str(CONFIGS / "local.toml"), "-m", "x")
    without = run("-m", "x")
    assert with_file.runtime == without.runtime
    for key in set(BY_KEY).difference(HOST_KEYS):
        one = next(one for one in OPTIONS if one.key == key)
        sections = (getattr(with_file, one.section), getattr(without, one.section))
        assert getattr(sections[0], one.field_name) == getattr(sections[1], one.field_name), key
    assert set(tomllib.loads(text)["runtime"]) == set(RuntimeConfig.names())


def test_two_hosts_holds_the_defaults_of_all_options_for_several():
    options = run("--config", str(CONFIGS / "two_hosts.toml"), "-m", "x", cwd=CONFIGS.parent)
    assert [(one.name, one.slots) for one in options.hosts.entries] == [("node1", 4), ("node2", 4)]
    assert options.ranks.workers == 0  # all slots
    without = run("-m", "x")
    for key in ("map_by", "ssh", "ssh_port", "ssh_always", "remote_python", "iface"):
        assert getattr(options.hosts, key) == getattr(without.hosts, key), key


def test_a_host_without_a_number_has_one_slot_in_a_list_and_its_cores_in_a_file(tmp_path):
    (tmp_path / "hosts").write_text("a\nb:2\n")
    of_file = run("--hostfile", "hosts", "-m", "x", cwd=tmp_path).hosts.entries
    assert [(one.name, one.slots) for one in of_file] == [("a", None), ("b", 2)]
    of_list = run("-H", "a,b:2,c,c", "-n", "2", "-m", "x").hosts.entries
    assert [(one.name, one.slots) for one in of_list] == [("a", 1), ("b", 2), ("c", 2)]
    rooms = [
        HostCapacity(one.name, one.slots)
        for one in run("-H", "a,b", "-n", "2", "-m", "x").hosts.entries
    ]
    assert place_workers(rooms, 2) == (1, 1)
    with pytest.raises(ConfigError, match="name:N in -H"):
        place_workers(rooms, 3)


def test_hosts_of_a_file_were_named_where_the_file_was(tmp_path):
    (tmp_path / "hosts").write_text("a:2\nb:2\n")
    options = run("--hostfile", "hosts", "-m", "x", cwd=tmp_path)
    assert [one.name for one in options.hosts.entries] == ["a", "b"]
    assert options.origin["hosts"] == "command line"


def test_options_of_several_hosts_that_do_not_fit_are_refused(tmp_path):
    (tmp_path / "hosts").write_text("a:2\nb:2 slot=3\n")
    for arguments, words in (
        (("--hostfile", "hosts"), "hosts:2:5: 'slot' is no option of a host (did you mean slots?)"),
        (("--hostfile", "host"), "No such file"),
        (("-H", "a:2", "--hostfile", "hosts"), "both name hosts"),
        (("--include", "a"), "selects among the hosts of --hostfile or -H"),
        (
            ("-H", "a:2", "--fake-hosts", "2"),
            "--fake-hosts simulates hosts, and --hostfile or -H name real hosts",
        ),
        (("-H", "a:2", "--ssh", "ssh -o 'x"), "it cannot be split into words"),
        (("-H", "a:2", "--exclude", "a"), "leave no host"),
    ):
        with pytest.raises(ConfigError) as caught:
            run(*arguments, "-m", "x", cwd=tmp_path)
        assert words in str(caught.value)


def test_the_commented_lines_of_local_are_right_too(tmp_path):
    text = (CONFIGS / "local.toml").read_text(encoding="utf-8")
    text = re.sub(r"^# (?=\w+ = )", "", text, flags=re.MULTILINE)
    options = run("--config", str(configuration(tmp_path, text)), "-m", "x")
    assert (options.ranks.debug, options.ranks.cores_per_worker) == (0, 1)


def test_ci_is_short_and_debug_is_endless():
    runtime = run("--config", str(CONFIGS / "ci.toml"), "-m", "x").runtime
    assert (runtime.lost_after_s, runtime.abort_grace_s, runtime.shutdown_timeout_s) == (
        1.5,
        0.5,
        3,
    )
    endless = run("--config", str(CONFIGS / "debug.toml"), "-m", "x").runtime
    assert endless == run("--debug", "0", "-m", "x").runtime
    assert (endless.collective_timeout_s, endless.check_shm) == (math.inf, "on")


def test_the_launcher_imports_no_numpy():
    code = (
        "import sys, syncvar_launcher.options.parse_options, syncvar_launcher.io.output, syncvar_launcher.job.failure_report, syncvar_launcher.job.settings_table\n"
        "sys.exit('numpy' in sys.modules or 'zmq' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Servers.


def test_servers_are_asked_for_with_a_copy_of_each_or_without():
    assert (run("-m", "x").ranks.servers, run("-m", "x").ranks.server_replicas) == (0, 0)
    options = run("--config", str(CONFIGS / "parameter_server.toml"), "-m", "x")
    assert (
        options.ranks.workers,
        options.ranks.servers,
        options.ranks.server_replicas,
        options.limits.max_restarts,
    ) == (
        4,
        2,
        1,
        3,
    )
    assert (
        run(
            "--servers", "3", "-m", "x", environ={"SYNCVAR_LAUNCH_SERVER_REPLICAS": "1"}
        ).ranks.server_replicas
        == 1
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--servers", "1", "--server-replicas", "1"),
            "copies are kept on other servers, and there are 1; give --servers 2 or more",
        ),
        (("--server-replicas", "1"), "there are 0"),
        (
            ("--servers", "3", "--server-replicas", "2"),
            "one copy on another server is kept, or none",
        ),
    ],
)
def test_copies_that_have_no_place_are_refused(arguments, words):
    with pytest.raises(ConfigError, match=words):
        run(*arguments, "-m", "x")


# Signals.


def test_signals_are_passed_on_by_name_or_number():
    assert parse_signals(run("-m", "x").limits.forward_signals) == (
        signal.SIGUSR1,
        signal.SIGUSR2,
        signal.SIGCONT,
    )
    assert parse_signals("usr1, SIGUSR2,10,SIGQUIT,40") == (10, 12, 3, 40)
    assert parse_signals("none") == ()


def test_totals_are_asked_for_as_a_table_or_a_file(folder, capsys):
    assert "must be yes, no or a path, not ''" in usage_error(capsys, "--stats=", "-m", "x")
    for argv, stats in (
        ([], False),
        (["--stats"], True),
        (["--stats=out.json"], folder / "out.json"),
        (["--stats", "--stats=no"], False),
    ):
        assert run(*argv, "train.py", cwd=folder).output.stats == stats
    assert run("-m", "x", environ={"SYNCVAR_LAUNCH_STATS": "1"}).output.stats is True
    assert run(
        "--config", str(configuration(folder, '[launch]\nstats = "a.json"\n')), "-m", "x"
    ).output.stats == Path("/a.json")


def test_dashboard_has_an_address_or_none(folder, capsys):
    cases = [
        ([], ""),
        (["--dashboard"], "127.0.0.1"),
        (["--dashboard=10.0.0.5:8787"], "10.0.0.5:8787"),
        (["--dashboard", "--dashboard=no"], ""),
    ]
    for argv, address in cases:
        options = run(*argv, "train.py", cwd=folder)
        assert (options.output.dashboard, options.program.target) == (address, "train.py")
    file = configuration(folder, "[launch]\ndashboard = true\n")
    assert run("--config", str(file), "-m", "x").output.dashboard == "127.0.0.1"
    assert run("--config", str(file), "--dashboard=no", "-m", "x").output.dashboard == ""
    assert run("-m", "x", environ={"SYNCVAR_LAUNCH_DASHBOARD": "node1"}).output.dashboard == "node1"
    assert "must be an address such as" in usage_error(capsys, "--dashboard=a:b", "-m", "x")
