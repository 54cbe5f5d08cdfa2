"""What the source may not contain, read from its syntax trees, and what imports may not load."""

import ast
import functools
import re
import subprocess
import sys
import tomllib

import pytest

from tests.support.paths import REPOSITORY

SOURCES = sorted(
    [*(REPOSITORY / "syncvar").rglob("*.py"), *(REPOSITORY / "launcher").rglob("*.py")]
)
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))

UNSAFE_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "yaml",
}
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
UNSAFE_ATTRIBUTES = {
    "recv_pyobj",
    "send_pyobj",
    "recv_serialized",
    "mktemp",
    "allow_pickle",
    "loads_pickle",
    "read_pickle",
}
UNSAFE_DOTTED = {
    "os.system",
    "os.popen",
    "os.spawnl",
    "os.spawnv",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
}

# A notebook's function travels to a child that the notebook started itself, over an inherited descriptor. With pickle=True
# so do arguments, and results come back through a private folder, which only this user's own workers write.
# A program of mpi4py may ask for pickle on its command line or by MPI.pickle; nothing else in the layer unpickles.
ALLOWED = {
    ("syncvar/compat/mpi4py/mpi_objects.py", "pickle"),
    ("syncvar/runner/by_value.py", "cloudpickle"),
    ("syncvar/bootstrap/worker_main.py", "compile"),
    (
        "syncvar/bootstrap/worker_main.py",
        "exec",
    ),  # the user's own script, as `python script.py` does
}


@functools.cache
@functools.cache
def tree_of(path):
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def trees_go_with_this_file():
    """Forget the million objects of all trees: every collection of a later test would look at each of them."""
    yield
    tree_of.cache_clear()


def dotted(node):
    """Return the name of an attribute chain, "os.path.join", or an empty text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def unsafe(tree):
    """Yield (line, word) for everything that could execute what came from outside."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if name.split(".")[0] in UNSAFE_MODULES:
                yield node.lineno, name.split(".")[0]
            if name in UNSAFE_DOTTED or name == "tempfile.mktemp":
                yield node.lineno, name
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_CALLS:
                yield node.lineno, node.func.id
            for keyword in node.keywords:
                falsy = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                if keyword.arg in ("shell", "allow_pickle") and not falsy:
                    yield node.lineno, f"{keyword.arg}="
            if dotted(node.func) in ("importlib.import_module", "import_module") and node.args:
                argument = node.args[0]
                if (
                    isinstance(argument, ast.Constant)
                    and str(argument.value).split(".")[0] in UNSAFE_MODULES
                ):
                    yield node.lineno, str(argument.value)
        if isinstance(node, ast.Attribute) and (
            node.attr in UNSAFE_ATTRIBUTES or dotted(node) in UNSAFE_DOTTED
        ):
            yield node.lineno, dotted(node) or node.attr


def test_nothing_executes_what_comes_from_outside():
    found = [
        (name, line, word)
        for name, path in ((str(path.relative_to(REPOSITORY)), path) for path in SOURCES)
        for line, word in unsafe(tree_of(path))
        if (name, word) not in ALLOWED
    ]
    assert not found, found


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml as y",
        "eval('1')",
        "exec(x)",
        "os.system('ls')",
        "subprocess.run(x, shell=True)",
        "subprocess.run(x, shell=flag)",
        "socket.recv_pyobj()",
        "np.load(f, allow_pickle=True)",
        "tempfile.mktemp()",
        "from tempfile import mktemp",
        "importlib.import_module('pickle')",
        "from os import popen",
        "def f():\n    import marshal",
        "import shelve",
        "__import__('pickle')",
        "import cloudpickle",
    ],
)
def test_the_search_finds(text):
    assert list(unsafe(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "import os",
        "subprocess.run(x, shell=False)",
        "np.load(f, allow_pickle=False)",
        "re.match(x, y)",
    ],
)
def test_the_search_lets_pass(text):
    assert not list(unsafe(ast.parse(text)))


COMPRESSING = {
    "zlib",
    "gzip",
    "bz2",
    "lzma",
    "zipfile",
    "tarfile",
    "zstandard",
    "zstd",
    "lz4",
    "snappy",
    "brotli",
    "blosc",
}


def compressing(tree):
    """Yield what a file uses of modules that compress, but for checksums."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += (
            [f"{node.module}.{alias.name}" for alias in node.names]
            if isinstance(node, ast.ImportFrom) and node.module
            else []
        )
        yield from (
            name
            for name in names
            if name.split(".")[0] in COMPRESSING and name not in ("zlib", "zlib.crc32")
        )
        if (
            isinstance(node, ast.Attribute)
            and dotted(node).startswith("zlib.")
            and dotted(node) != "zlib.crc32"
        ):
            yield dotted(node)
        if isinstance(node, ast.Call):
            yield from (
                f"{one.arg}="
                for one in node.keywords
                if one.arg in ("compress", "compression", "compresslevel")
            )
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and node.value.startswith("Compression=")
        ):
            yield node.value  # an option of ssh


def test_nothing_is_compressed():
    """What a few bytes unpack to has no bound: nothing that is sent or stored is packed, so that nothing has to be unpacked.

    The file of `syncvar report` is for people, and no code of ours reads it.
    """
    found = {
        str(path.relative_to(REPOSITORY)): list(compressing(tree_of(path))) for path in SOURCES
    }
    written_only = {"syncvar/cli/report.py": ["zipfile"]}
    assert {name: words for name, words in found.items() if words} == written_only


@pytest.mark.parametrize(
    "text",
    [
        "import gzip",
        "from zlib import decompress",
        "import zlib\nzlib.compress(b'')",
        "import lz4.frame",
        "np.savez(f, compress=True)",
        "x = ('-o', 'Compression=yes')",
    ],
)
def test_the_search_finds_what_compresses(text):
    assert list(compressing(ast.parse(text)))


def test_no_test_is_left_out():
    # A test that is skipped or expected to fail hides what it was written for.
    # So does one whose module may be missing: what tests need comes with the extra `test`.
    words = (
        "pytest.skip",
        "pytest.importorskip",
        "pytest.xfail",
        "pytest.mark.skip",
        "pytest.mark.skipif",
        "pytest.mark.xfail",
        "unittest.skip",
    )
    found = [
        (str(path.relative_to(REPOSITORY)), node.lineno, dotted(node))
        for path in TESTS
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and dotted(node) in words
    ]
    assert not found, found


LOGGING = {"debug", "info", "warning", "error", "exception", "critical", "log"}


def templates(tree):
    """Yield (line, word) for log templates and formats that are not texts of the source."""
    own = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        called, on = node.func.attr, node.func.value
        if called in LOGGING and isinstance(on, ast.Name) and "log" in on.id:
            template = node.args[1 if called == "log" else 0]
            if not (
                isinstance(template, ast.Constant)
                or (isinstance(template, ast.Name) and template.id in own)
            ):
                yield node.lineno, f"{on.id}.{called}"
        is_own = isinstance(on, ast.Constant) or (isinstance(on, ast.Name) and on.id in own)
        is_own |= isinstance(on, ast.Attribute) and on.attr in FORMATS
        if called in ("format", "format_map") and not is_own and (node.args or node.keywords):
            yield node.lineno, dotted(node.func) or called


FORMATS = {"fix"}  # of a rule in `syncvar.variables.policy`: texts of the source too

# The rooms that read what comes from other processes, and the names under which they have it.
READERS = [
    path
    for path in SOURCES
    if {"protocol", "transports", "runtime", "launcher"} & {*path.relative_to(REPOSITORY).parts}
    or path.name in ("exit_status.py", "folder.py", "manifest.py")
]
RECEIVED = {
    "message",
    "record",
    "verdict",
    "header",
    "frame",
    "roll",
    "fields",
    "told",
    "data",
    "identity",
    "parts",
}
NAMING = {
    "getattr",
    "setattr",
    "delattr",
    "hasattr",
    "open",
    "os.open",
    "os.unlink",
    "os.rename",
    "os.replace",
    "os.makedirs",
    "Path",
    "import_module",
    "importlib.import_module",
}


def received_names(tree):
    """Yield (line, word) for calls that take an attribute's or a file's name from something received."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (
            dotted(node.func) in NAMING
            or (isinstance(node.func, ast.Name) and node.func.id in NAMING)
        ):
            for argument in (
                node.args[1:2]
                if dotted(node.func) in ("getattr", "setattr", "delattr", "hasattr")
                else node.args[:1]
            ):
                for part in ast.walk(argument):
                    if (
                        isinstance(part, ast.Subscript)
                        and isinstance(part.value, ast.Name)
                        and part.value.id in RECEIVED
                    ):
                        yield node.lineno, f"{dotted(node.func)}({part.value.id}[…])"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_log_templates_and_formats_are_our_own(path):
    """What another process has sent may stand in a log, and is never what a log or a text is made by."""
    assert not list(templates(tree_of(path)))


def test_no_name_comes_from_the_wire():
    found = {
        str(path.relative_to(REPOSITORY)): list(received_names(tree_of(path))) for path in READERS
    }
    assert len(found) > 40
    assert not {name: words for name, words in found.items() if words}


@pytest.mark.parametrize(
    "text",
    [
        "_log.warning(f'{x}')",
        "_log.info(message['text'])",
        "message.format(x)",
        "log.error(text)",
        "_log.log(level, text)",
    ],
)
def test_the_search_finds_templates(text):
    assert list(templates(ast.parse(text)))


@pytest.mark.parametrize(
    "text",
    [
        "getattr(self, message['kind'])",
        "open(message['path'])",
        "os.open(f\"{record['name']}\", 0)",
        "setattr(x, fields['a'], 1)",
    ],
)
def test_the_search_finds_received_names(text):
    assert list(received_names(ast.parse(text)))


WALL_CLOCK = {
    "time.time",
    "time.time_ns",
    "time.ctime",
    "time.gmtime",
    "time.localtime",
    "time.strftime",
    "datetime",
}
# What a person reads: the time beside a line of output, in a record and in a lock; and the user's own dates,
# which are data. Nothing is decided by it.
SHOWN_TIMES = {
    "launcher/job/job_files.py": {"time.time"},
    "launcher/io/output.py": {"datetime"},
    "launcher/job/restart_loop.py": {"time.time"},
    "syncvar/runtime/recorder.py": {"time.time_ns"},
    "syncvar/cli/doctor/pair_probe.py": {"time.time_ns"},  # what it measures is the clock
    "syncvar/cli/report.py": {"time.strftime"},
    "syncvar/checkpoint/folder.py": {"time.strftime", "time.gmtime"},
    "syncvar/protocol/object_codec.py": {"datetime"},
    "syncvar/transports/lane_tls.py": {"datetime"},  # a certificate that is always valid
    # torch's timeouts are intervals of this module
    "syncvar/torch/process_group.py": {"datetime"},
    "syncvar/torch/torch_rendezvous.py": {"datetime"},
    "syncvar/torch/torch_work.py": {"datetime"},
}


def wall_clock(tree):
    """Yield the names by which a file asks what time of day it is, however it has imported them."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            name = names.get(node.id, "")
        else:
            first, _, rest = (
                dotted(node).partition(".") if isinstance(node, ast.Attribute) else ("", "", "")
            )
            name = f"{names.get(first, first)}.{rest}"
        if name in WALL_CLOCK or name.startswith("datetime."):
            yield name if name.startswith("time.") else "datetime"


def test_the_wall_clock_decides_nothing():
    """Clocks of hosts differ and jump: deadlines and waits are measured by the monotonic clock, here and nowhere else."""
    found = {str(path.relative_to(REPOSITORY)): set(wall_clock(tree_of(path))) for path in SOURCES}
    assert {name: words for name, words in found.items() if words} == SHOWN_TIMES
    assert not re.search(
        r"\b(now|utcnow|today|fromtimestamp)\(",
        (REPOSITORY / "syncvar/protocol/object_codec.py").read_text(),
    )


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.time()",
        "from time import time\ntime()",
        "import time as t\nt.time_ns()",
        "from datetime import datetime\ndatetime.now()",
        "import datetime\ndatetime.datetime.now()",
        "from time import time_ns as now\nx = now",
    ],
)
def test_the_search_finds_the_wall_clock(text):
    assert list(wall_clock(ast.parse(text)))


def tracked():
    listed = subprocess.run(
        ["git", "-C", str(REPOSITORY), "ls-files", "-z"], capture_output=True, check=False
    ).stdout.split(b"\0")
    names = [name.decode() for name in listed if name]
    if not names:  # not a checkout but a copy of its files, in which tests may have left theirs
        names = [
            str(path.relative_to(REPOSITORY))
            for path in REPOSITORY.rglob("*")
            if not any(
                part in ("build", "dist", "__pycache__")
                or part.endswith(".egg-info")
                or (part[0] == "." and part != ".ci")
                for part in path.relative_to(REPOSITORY).parts
            )
        ]
    return [REPOSITORY / name for name in names if (REPOSITORY / name).is_file()]


def test_no_file_names_a_place_of_one_machine():
    words = [
        b"/wo" + b"rk/",
        b"../sha" + b"red",
    ]  # in two parts, so that this file does not name them either
    found = [
        f"{path.relative_to(REPOSITORY)}:{number}"
        for path in tracked()
        for number, line in enumerate(path.read_bytes().split(b"\n"), 1)
        if any(word in line for word in words)
    ]
    assert not found, found


def loaded(code):
    """Return the modules that a fresh interpreter has loaded after running `code`."""
    text = f"{code}\nimport sys; print('\\n'.join(sys.modules))"
    line = [sys.executable, "-c", text]
    return set(
        subprocess.run(line, capture_output=True, text=True, check=True, timeout=30).stdout.split()
    )


SLOW = {
    "argparse",
    "asyncio",
    "difflib",
    "email",
    "hashlib",
    "hmac",
    "multiprocessing",
    "socket",
    "ssl",
    "subprocess",
}
"""Modules that cost a millisecond or more."""


@pytest.mark.parametrize(
    ("code", "banned"),
    [
        ("import syncvar", {"numpy", "zmq", "msgpack", "threading", "argparse"}),
        ("import syncvar; syncvar.ConfigError; syncvar.PeerLost", {"numpy", "zmq"}),
        (
            "import syncvar_launcher.job.job, syncvar_launcher.job.attempt",
            {"numpy", "syncvar.collectives", "syncvar.variables", "cloudpickle"},
        ),
        (
            "import syncvar_launcher.local.local_workers, syncvar_launcher.job.supervisor, syncvar_launcher.job.failure_report",
            {"numpy"},
        ),
        ("import syncvar_launcher.options.command_line as o; o.help_text()", {"numpy", "zmq"}),
        (
            "import syncvar_launcher.job.job, syncvar_launcher.job.attempt",
            SLOW - {"argparse", "socket", "subprocess"},
        ),
        (
            "import syncvar_launcher.job.job, syncvar_launcher.job.attempt",
            {"syncvar.transports.curve", "syncvar.algorithms"},
        ),
        (
            "import syncvar_launcher.main",
            {"syncvar", "subprocess", "socket"},
        ),  # Ctrl-C is answered from here on
        (  # not before a fork server has been started
            "import syncvar_launcher.job.job",
            {
                "zmq",
                "syncvar.bootstrap.rendezvous_server",
                "syncvar_launcher.job.restart_loop",
                "dataclasses",
                "inspect",
                "shutil",
            },
        ),
    ],
)
def test_what_an_import_does_not_load(code, banned):
    assert not loaded(code) & banned


SLOW_ROOMS = {
    f"syncvar.{room}"
    for room in (
        "cli",
        "checkpoint",
        "data",
        "examples",
        "optimizers",
        "parameter_server",
        "strategies",
        "testing",
        "variables",
    )
}


@pytest.mark.parametrize(
    ("code", "banned"),
    [
        (
            "import syncvar; syncvar.all_reduce",
            SLOW
            | SLOW_ROOMS
            | {"zmq", "json", "syncvar.core.settings", "syncvar.transports.zeromq_transport"},
        ),
        (
            "import syncvar.bootstrap.worker_main, syncvar.transports.zeromq_links, syncvar.transports.zeromq_transport, syncvar; syncvar.init, syncvar.barrier",
            SLOW
            | SLOW_ROOMS
            | {"zmq.asyncio", "syncvar.transports.curve", "syncvar.protocol.coordinator"},
        ),
    ],
    ids=["the package", "a worker"],
)
def test_what_is_not_loaded_beyond_numpy(code, banned):
    assert not (loaded(code) - loaded("import numpy")) & banned


def test_the_guardian_is_tiny():
    # Run as the agent runs it: by path and isolated. Here its input is at once an orderly ".".
    command = [
        sys.executable,
        "-I",
        "-S",
        "-X",
        "importtime",
        str(REPOSITORY / "launcher" / "local" / "process_sessions.py"),
        "/nonexistent",
    ]
    ended = subprocess.run(
        command, input=".\n", capture_output=True, text=True, check=True, timeout=30
    )
    modules = {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}
    assert "signal" in modules
    assert not {
        name
        for name in modules
        if name.split(".")[0]
        in {"numpy", "zmq", "msgpack", "syncvar", "subprocess", "socket", "shutil"}
    }


def test_every_package_is_installed():
    """Where the tree itself is not on the path a folder that is not named is not there."""
    named = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    found = {
        ".".join(path.parent.relative_to(REPOSITORY).parts).replace(
            "launcher", "syncvar_launcher", 1
        )
        for path in SOURCES
        if path.name == "__init__.py"
    }
    assert found == set(named)
