"""`sv.run`: starts workers from a program or notebook.

The launcher runs as a child process. The function travels by name, or from a notebook through
`by_value`; arguments and results travel as plain data. `RunOptions` become options of
`syncvar-launch`, which checks their values. Nothing is left when the call returns.
"""

from __future__ import annotations

import contextlib
import math
import numbers
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from abc import ABCMeta
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Never

from syncvar.bootstrap.worker_entry import command_of, pack_path
from syncvar.core import exit_status
from syncvar.core.environment import PREFIX
from syncvar.core.errors import ConfigError, LaunchError, RankFailed, SyncvarError
from syncvar.core.html_table import RankResults, is_kernel
from syncvar.protocol.exception_codec import unpack_exception
from syncvar.protocol.object_codec import may_travel, pack_object, unpack_object

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from syncvar.runner.engines import Engine

_GRACE_S = 30.0
_NOT_INHERITED = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "HOST_INDEX", "HOST_COUNT"),
    *("RENDEZVOUS", "JOB_ID", "ROLE", "GENERATION", "RESTARTS", "HOST", "STATUS_FD", "FLIGHT_DIR"),
)
_UNGUARDED = "unguarded"
# The module that this worker is importing to find its function.
_guarded_imports: list[tuple[str, Path | None]] = []


class RunOptions(NamedTuple):
    """Options of `sv.run` for the launcher."""

    # number of workers; "auto" for one per usable core; None for the launcher's default
    workers: int | str | None
    limit_s: float  # time limit of the whole job, in seconds
    max_restarts: int  # how often all workers may be restarted
    servers: int  # number of parameter servers
    # hosts with slots, or the path of a host file; None for this host
    hosts: Sequence[str] | str | None
    env: Mapping[str, str]  # variables of all workers
    output: str | None  # ranks whose lines are shown; None for the launcher's default
    log_dir: str | None  # folder for one file per rank and stream; None for none

    def command_line(self) -> list[str]:
        """Return the options of the launcher; it copies the variables of `env` from its own."""
        pairs: list[tuple[str, Any]] = [
            ("--workers", self.workers),
            ("--timeout", None if self.limit_s == math.inf else self.limit_s),
            ("--max-restarts", self.max_restarts or None),
            ("--servers", self.servers or None),
            ("--hostfile", self.hosts if isinstance(self.hosts, str) else None),
            ("--hosts", ",".join(self.hosts) if isinstance(self.hosts, list) else None),
            ("--output", self.output),
            ("--log-dir", self.log_dir),
            *(("--env", name) for name in self.env),
        ]
        return [f"{name}={value}" for name, value in pairs if value is not None]

    def check_engine(self) -> None:
        """Raise ConfigError if an option is for the launcher only."""
        if self.workers == "auto":
            raise ConfigError(
                'workers="auto" counts the cores of this host: write a number for an engine'
            )
        for name in ("servers", "hosts", "env", "output", "log_dir"):
            if getattr(self, name):
                raise ConfigError(
                    f'{name}= is an option of engine="local": leave it out for an engine'
                )


def checked_options(
    workers: Any, timeout: Any, max_restarts: Any, others: Mapping[str, Any]
) -> RunOptions:
    """Return the options of a call of `sv.run`; raise ConfigError for a wrong type."""
    is_count = isinstance(workers, int) and not isinstance(workers, bool) and workers >= 1
    if workers not in (None, "auto") and not is_count:
        raise ConfigError(f'workers must be a positive integer or "auto", not {workers!r:.100}')
    return RunOptions(
        workers=workers,
        limit_s=math.inf if timeout is None else _seconds(timeout),
        max_restarts=_count("max_restarts", max_restarts),
        servers=_count("servers", others["servers"]),
        hosts=_hosts(others["hosts"]),
        env=_variables(others["env"]),
        output=_output(others["output"]),
        log_dir=None if others["log_dir"] is None else _path("log_dir", others["log_dir"]),
    )


@contextlib.contextmanager
def import_guard(module_name: str, folder: Path | None) -> Iterator[None]:
    """Refuse calls of `run` while a worker imports the module or file of its function.

    `folder`, of results, gets the error for the caller of `run`; None if exceptions reach it.
    """
    _guarded_imports.append((module_name, folder))
    try:
        yield
    finally:
        _guarded_imports.pop()


def run(  # noqa: PLR0913  (public signature)
    fn: Callable[..., Any],
    workers: int | str | None = None,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout: float | None = None,
    engine: str | Engine = "local",
    max_restarts: int = 0,
    pickle: bool = False,
    servers: int = 0,
    hosts: Sequence[str] | str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    output: str | Sequence[int] | None = None,
    log_dir: str | os.PathLike[str] | None = None,
    **_foreign: Never,
) -> list[Any]:
    """Call `fn(*args, **kwargs)` as every rank of a new job and return the results by rank.

    Works from scripts, modules and, with the package cloudpickle, notebooks. As with
    multiprocessing's "spawn", a script's top level must be importable without side effects. Output
    of the workers appears here as it comes.

    Args:
        fn: Function to call; it may use everything of syncvar.
        workers: Number of ranks; "auto" for one per usable core. Default: 1, or with `hosts` one
            per slot.
        args: Positional arguments: types that `sv.broadcast_object` accepts (numbers, texts, dates
            and times of `datetime`, lists, sets, dicts, arrays, tensors), or anything with
            `pickle=True`.
        kwargs: Keyword arguments of the same types.
        timeout: Seconds for the whole job; None for no limit.
        engine: Where the workers run: "local" for this host, "ray" for actors of Ray, "dask" for
            tasks of Dask. Ray and Dask use the cluster that this program is connected to; without
            one, a cluster on this host for the time of the call. `sv.engines.Ray` and
            `sv.engines.Dask` take options.
        max_restarts: How often all workers may be restarted after a failure; see `restart_count`.
        pickle: Arguments and results travel by cloudpickle, as functions of notebooks do:
            DataFrames, models, figures, instances of your own classes. Needs `pip install
            cloudpickle`.
        servers: Number of parameter servers, as `syncvar-launch --servers`.
        hosts: List of hosts with slots (`["node1:4", "node2:4"]`) or path of a host file, as
            `syncvar-launch -H` and `--hostfile`. The function then travels as one of a notebook
            does, unless it is in a module.
        env: Variables of the workers, besides those that they inherit, as `syncvar-launch --env`.
        output: Ranks whose lines are shown: "all", "first", "failed", "none" or rank numbers, as
            `syncvar-launch --output`.
        log_dir: Folder for one file per rank and stream, as `syncvar-launch --log-dir`.

    Returns:
        The result of `fn` on each rank, of the same types as arguments. Without `pickle`, `run`
        raises ConfigError for a result that cannot travel; before the work if the annotation of
        `fn` says so.

    Raises:
        ConfigError: An argument is wrong, or packages of the engine are missing; nothing was
            started. Or workers reached this very call when they imported the file of `fn`: put it
            under `if __name__ == "__main__":`.
        RankFailed: A worker failed; rank, host, exit code and traceback of the first failure are
            its attributes.
        LaunchError: The launcher itself failed, or the engine has no space for so many workers.

    Cost: the start of the workers, and of a cluster of Ray or Dask if there is none.

    Example:
        >>> import syncvar as sv
        >>> sv.run(divmod, workers=1, args=(7, 2))
        [(3, 1)]
    """
    if _foreign:
        from syncvar.core.migration_hints import unexpected_keyword

        raise unexpected_keyword(run, _foreign)
    others = {"servers": servers, "hosts": hosts, "env": env, "output": output, "log_dir": log_dir}
    options = checked_options(workers, timeout, max_restarts, others)
    _check_call(fn, args, kwargs)
    is_local = engine == "local"
    has_files = is_local and hosts is None
    call = _packed_call(fn, tuple(args), dict(kwargs or {}), has_files=has_files, pickle=pickle)
    try:
        packed = _launch(call, options) if is_local else _drive(engine, call, options)
    except KeyboardInterrupt:
        raise KeyboardInterrupt from None  # hides the frames of the wait
    if pickle:
        from syncvar.runner.by_value import unpack_values

        results = [
            unpack_values(one, f"the result of rank {rank}") for rank, one in enumerate(packed)
        ]
    else:
        results = [unpack_object(one) for one in packed]
    return RankResults(results) if is_kernel() else results


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{name} must be a whole number of at least 0, not {value!r:.100}")
    return value


def _seconds(timeout: Any) -> float:
    number = timeout
    if isinstance(timeout, bool) or not isinstance(timeout, numbers.Real):
        number = math.nan
    try:
        seconds = float(number)
    except OverflowError:  # a whole number beyond all floats
        seconds = math.inf if number > 0 else math.nan
    if not seconds > 0:
        raise ConfigError(
            f"timeout must be seconds above 0, or None for no limit, not {timeout!r:.100}"
        )
    return seconds


def _hosts(hosts: Any) -> list[str] | str | None:
    if hosts is None:
        return None
    if isinstance(hosts, str | os.PathLike):
        return _path("hosts", hosts)
    names = list(hosts) if hasattr(hosts, "__iter__") else []
    if not names or not all(isinstance(one, str) and one for one in names):
        raise ConfigError(
            f"hosts must be a list such as ['node1:4', 'node2:4'], or the path of a host file, "
            f"not {hosts!r:.100}"
        )
    return names


def _variables(env: Any) -> dict[str, str]:
    if env is None:
        return {}
    is_mapping = hasattr(env, "items") and all(
        isinstance(text, str) for pair in env.items() for text in pair
    )
    if not is_mapping:
        raise ConfigError(
            f"env must be a dict of texts, such as env={{'NAME': 'value'}}, not {env!r:.100}"
        )
    for name, value in env.items():
        if not name or "=" in name or "*" in name or "\0" in name + value:
            raise ConfigError(
                f"env has {name!r:.100}, which cannot be a variable with such a value"
            )
    return dict(env)


def _output(output: Any) -> str | None:
    if output is None or isinstance(output, str):
        return output
    ranks = list(output) if hasattr(output, "__iter__") else [output]
    if not ranks or not all(isinstance(one, int) and not isinstance(one, bool) for one in ranks):
        raise ConfigError(
            f'output must be "all", "first", "failed", "none" or ranks, not {output!r:.100}'
        )
    return ",".join(str(one) for one in ranks)


def _path(name: str, path: Any) -> str:
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"{name} must be a path, not {path!r:.100}")
    return text


def _drive(engine: str | Engine, call: bytes, options: RunOptions) -> list[bytes]:
    options.check_engine()
    from syncvar.runner.engines import drive, engine_of

    workers = int(options.workers or 1)
    return drive(engine_of(engine), call, workers, options.limit_s, options.max_restarts)


def _check_call(fn: Any, args: Any, kwargs: Any) -> None:
    if not callable(fn):
        raise ConfigError(f"fn must be a function, not {type(fn).__name__}")
    if isinstance(args, str | bytes) or not hasattr(args, "__iter__"):
        raise ConfigError(
            "args must be a tuple or list of positional arguments, such as args=(x,), not "
            f"{args!r:.100}"
        )
    if kwargs is not None and not (
        hasattr(kwargs, "keys") and all(isinstance(name, str) for name in kwargs)
    ):
        raise ConfigError(
            f"kwargs must be a dict of arguments by name, such as kwargs={{'x': 1}}, not "
            f"{kwargs!r:.100}"
        )
    if _guarded_imports:
        module_name, results = _guarded_imports[0]
        sentence = (
            f"a worker that imported {module_name}, to find the function that it is to call, came "
            "to a call of sv.run there: put the call under if __name__ == '__main__':"
        )
        if results is not None:
            partial = results / f"{_UNGUARDED}.{os.getpid()}.part"  # all ranks write it at once
            partial.write_text(sentence)
            partial.rename(results / _UNGUARDED)
        raise ConfigError(sentence)


def _packed_call(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    has_files: bool,
    pickle: bool,
) -> bytes:
    """Return a call as `remote_call.make_call` takes it; raise for values that cannot travel."""
    where, *_ = description = _describe(fn, has_files=has_files)
    if pickle:
        from syncvar.runner.by_value import pack_values

        is_main = where != "copy" and fn.__module__ == "__main__"
        names = ("__main__",) if is_main else ()
        data = pack_values((args, kwargs), "the arguments of the function", names)
        return pack_object({"fn": description, "is_main": is_main, "pickled": data})
    _check_annotation(fn)
    packed = [
        pack_object(values, place=part, advice="sv.run(..., pickle=True)")
        for part, values in (("args", args), ("kwargs", kwargs))
    ]
    return pack_object({"fn": description, "args": packed[0], "kwargs": packed[1]})


def _check_annotation(fn: Callable[..., Any]) -> None:
    """Raise ConfigError if the annotated result of a function cannot travel."""
    result_type: Any = getattr(fn, "__annotations__", {}).get("return")
    # Other metaclasses may accept more instances.
    is_class = type(result_type) in (type, ABCMeta)
    if is_class and not may_travel(result_type):
        raise ConfigError(
            f"the function returns a {result_type.__module__}.{result_type.__qualname__}, "
            "as its annotation says, which cannot travel as plain data: write sv.run(..., "
            "pickle=True)"
        )


def _launch(call: bytes, options: RunOptions) -> list[bytes]:
    folder = Path(tempfile.mkdtemp(prefix="syncvar-run-"))
    call_fd = os.memfd_create("syncvar-call", os.MFD_CLOEXEC)
    alive_read, alive_write = os.pipe2(os.O_CLOEXEC)
    try:
        with open(call_fd, "wb", closefd=False) as file:  # noqa: PTH123
            file.write(pack_path() + call)
        left_out = {PREFIX + name for name in _NOT_INHERITED}
        environ = {name: value for name, value in os.environ.items() if name not in left_out}
        environ |= options.env
        environ |= {
            "SYNCVAR_PASS_FDS": str(call_fd),
            "SYNCVAR_PARENT_FD": str(alive_read),
            "SYNCVAR_CALL_FD": str(call_fd),
            "SYNCVAR_RESULT_DIR": str(folder),
            "SYNCVAR_OUTCOME_FILE": str(folder / "outcome"),
        }
        launcher = [*command_of("syncvar_launcher.main"), *options.command_line()]
        process = subprocess.Popen(  # noqa: S603
            [*launcher, "-m", "syncvar.runner.remote_call"],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(call_fd, alive_read),
            start_new_session=True,
        )
        code = _wait(process)
        if code != 0:
            failure = _failure(folder, code)
            raise failure from failure.__cause__
        return _results(folder)
    finally:
        for descriptor in (call_fd, alive_read, alive_write):
            os.close(descriptor)
        shutil.rmtree(folder, ignore_errors=True)


def _describe(fn: Callable[..., Any], *, has_files: bool) -> tuple[Any, ...]:
    """Return how a worker finds the function: ("module", …), ("file", …) or ("copy", …)."""
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    found: Any = sys.modules.get(module or "")
    for part in name.split("."):
        found = getattr(found, part, None)
    if module is not None and found is fn:
        if module != "__main__":
            return ("module", module, name)
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        if spec is not None and spec.name != "__main__":
            return ("module", spec.name.removesuffix(".__main__"), name)
        path = getattr(main, "__file__", None)
        if has_files and path and Path(path).is_file():
            return ("file", str(Path(path).resolve()), name)
    from syncvar.runner.by_value import pack_function

    return ("copy", *pack_function(fn))


def _wait(process: subprocess.Popen[bytes]) -> int:
    pumps = [
        threading.Thread(target=_pump, args=(source, sink), name="syncvar-output", daemon=True)
        for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    ]
    for pump in pumps:
        pump.start()
    try:
        code = _wait_and_show(process) if is_kernel() else process.wait()
    except BaseException:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    finally:
        for pump in pumps:
            pump.join()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return code


def _wait_and_show(process: subprocess.Popen[bytes]) -> int:
    """Wait for the launcher, and show what its ranks do in the notebook."""
    from syncvar.runner.notebook_view import NotebookView

    view = NotebookView(process.pid)
    ending = "were interrupted"
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = process.wait(view.due_s())
                ending = "finished" if code == 0 else "failed"
                return code
            view.refresh()
    finally:
        view.finish(ending)


def _pump(source: IO[bytes] | None, sink: Any) -> None:
    if source is None:
        return
    with contextlib.suppress(ValueError, OSError):
        for line in iter(source.readline, b""):
            sink.write(line.decode(errors="backslashreplace"))
            sink.flush()


def _failure(folder: Path, code: int) -> SyncvarError:
    if (folder / _UNGUARDED).exists():
        return ConfigError((folder / _UNGUARDED).read_text())
    try:
        outcome = unpack_object((folder / "outcome").read_bytes())
    except OSError:
        return LaunchError(f"the launcher ended with exit code {code}")
    if "refused" in outcome:
        is_configuration = code in (exit_status.USAGE, exit_status.CONFIGURATION)
        return (ConfigError if is_configuration else LaunchError)(outcome["refused"])
    failure = RankFailed(outcome["rank"], outcome["host"], outcome["exit_code"], outcome["text"])
    with contextlib.suppress(OSError):  # absent if its process was killed
        failure.__cause__ = unpack_exception((folder / f"error.{failure.rank}").read_bytes())
    return failure


def _results(folder: Path) -> list[bytes]:
    """Return the packed results by rank; each rank also writes the number of ranks."""
    counts = [int(path.suffix[1:]) for path in folder.glob("of.*")]
    results = []
    for rank in range(counts[0] if counts else 1):
        try:
            results.append((folder / f"result.{rank}").read_bytes())
        except FileNotFoundError:
            raise LaunchError(f"rank {rank} ended without returning a result") from None
    return results
