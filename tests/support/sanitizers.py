"""The kernel's modules built with the sanitizers of addresses and of undefined behaviour, which end a process at the first mistake."""

import shutil
import subprocess
import sysconfig
import tomllib

from tests.support.paths import REPOSITORY

NOT_LOADED = 86  # what a process ends with that cannot load such a module: with the installed one nothing would be tested
_SANITIZERS = [
    "-O1",
    "-g",
    "-fPIC",
    "-shared",
    "-fsanitize=address,undefined",
    "-fno-sanitize-recover=all",
]
_LOADING = """
import importlib.util, os, sys, traceback

try:
    spec = importlib.util.spec_from_file_location({name!r}, {built!r})
    sys.modules[spec.name] = made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
except BaseException:
    traceback.print_exc()
    sys.stderr.flush()
    os._exit({code})
open(os.path.join({folder!r}, f"loaded-{{os.getpid()}}"), "w").close()
"""


def sanitized(name, folder):
    """Build a module of the kernel as pyproject.toml does, and return the variables with which processes load it."""
    compiler = _compiler()
    with (REPOSITORY / "pyproject.toml").open("rb") as file:
        (module,) = [
            one
            for one in tomllib.load(file)["tool"]["setuptools"]["ext-modules"]
            if one["name"] == f"syncvar._native.{name}"
        ]
    built, sources = folder / f"{name}.so", [str(REPOSITORY / one) for one in module["sources"]]
    include = f"-I{sysconfig.get_path('include')}"
    subprocess.run(
        [
            compiler,
            *module["extra-compile-args"],
            *_SANITIZERS,
            include,
            *sources,
            "-o",
            str(built),
        ],
        check=True,
        timeout=300,
    )
    return variables(name, built)


def variables(name, built):
    """Return the variables with which processes load a module that has been built, or end."""
    folder = built.parent
    loading = _LOADING.format(
        name=f"syncvar._native.{name}", built=str(built), folder=str(folder), code=NOT_LOADED
    )
    (folder / "sitecustomize.py").write_text(loading)
    asked = subprocess.run(
        [_compiler(), "-print-file-name=libasan.so"],
        check=True,
        timeout=120,
        capture_output=True,
        text=True,
    )
    return {
        "LD_PRELOAD": asked.stdout.strip(),
        "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": "detect_leaks=0",
        "PYTHONPATH": str(folder),
    }


def _compiler():
    found = shutil.which("gcc")
    assert found, "apt-get install gcc"
    return found


def loaded(folder):
    """Return how many processes have loaded what has been built here."""
    return len(list(folder.glob("loaded-*")))
