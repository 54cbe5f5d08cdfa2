"""From command line, environment and TOML file to `LaunchOptions`.

The command line overrides the environment, which overrides the tables [launch] and [runtime] of a
TOML file. Variables are `SYNCVAR_LAUNCH_<OPTION>`, and `SYNCVAR_<SETTING>` for settings of the
runtime. `origin` keeps the source of each value for `--dry-run`.
"""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from syncvar.core.environment import PREFIX
from syncvar.core.errors import ConfigError
from syncvar.core.settings import RuntimeConfig, nearest
from syncvar_launcher.options.command_line import read_command_line
from syncvar_launcher.options.launch_options import (
    HostOptions,
    JoinOptions,
    LaunchOptions,
    LimitOptions,
    OutputOptions,
    ProgramOptions,
    RankOptions,
    RankProgram,
    host_count_of,
    short_name,
)
from syncvar_launcher.options.option_table import (
    BY_KEY,
    BY_VARIABLE,
    LAUNCH_PREFIX,
    OPTIONS,
    Option,
    WorkerRange,
)
from syncvar_launcher.options.worker_environment import env_variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from syncvar_launcher.options.command_line import CommandLine
    from syncvar_launcher.options.hostfile import Host, Hosts
    from syncvar_launcher.options.launch_options import Allocation

_KEY_FILE = ".syncvar-key"
_HOSTFILE_NBYTES_MAX = 1 << 20
_LAYERS = ("default", "file", "environment", "command line")
_PATH_SETTINGS = ("trace", "ledger", "auto_log", "auto_replay", "match_log", "match_replay")

# The settings of `--debug`, as in configs/debug.toml. Deadlines are endless: a person at a
# breakpoint is not a failure. The graces and the shutdown stay finite, because they run only when a
# job ends, and a failed job must end.
_DEBUG_SETTINGS: dict[str, Any] = {
    "rendezvous_timeout_s": math.inf,
    "handshake_timeout_s": math.inf,
    "suspect_after_s": math.inf,
    "lost_after_s": math.inf,
    "stall_warning_s": math.inf,
    "collective_timeout_s": math.inf,
    "check_shm": "on",
}


def read_config_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the checked options and the checked runtime settings of a file."""
    document = _document(path)
    for name, table in document.items():
        if name not in ("launch", "runtime"):
            hint = nearest(name, ("launch", "runtime"))
            raise ConfigError(f"{path}: unknown table [{name}]{hint}")
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table")
    launch: dict[str, Any] = {}
    for key, value in document.get("launch", {}).items():
        option = BY_KEY.get(key)
        if option is None:
            is_setting = key in RuntimeConfig.names()
            hint = ": it belongs to [runtime]" if is_setting else setting_hint(key, key, BY_KEY)
            raise ConfigError(f"{path}: unknown key {key!r} in [launch]{hint}")
        launch[key] = read_value(option, value, f"{path}: {key} in [launch]", is_text=False)
    settings: dict[str, Any] = {}
    for key, value in document.get("runtime", {}).items():
        if key not in RuntimeConfig.names():
            names = RuntimeConfig.names()
            hint = ": it belongs to [launch]" if key in BY_KEY else setting_hint(key, key, names)
            raise ConfigError(f"{path}: unknown key {key!r} in [runtime]{hint}")
        settings[key] = _setting(key, value, f"{path}: [runtime]")
    return launch, settings


def read_value(option: Option, value: Any, source: str, *, is_text: bool) -> Any:
    """Return the checked value of an option; errors begin with the source."""
    try:
        return option.value(value, is_text=is_text)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None


def setting_hint(key: str, text: str, known: Iterable[str]) -> str:
    """Return the setting that a short option stands for, or the most similar known name."""
    for option in OPTIONS:
        if option.setting and key == option.key:
            name = option.setting
            return f": it sets {name}, which is {PREFIX}{name.upper()} or a key of [runtime]"
    return nearest(text, tuple(known))


def _document(path: Path) -> dict[str, Any]:
    import tomllib  # only a file needs it

    try:
        return tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None


def _setting(name: str, value: Any, source: str) -> Any:
    kind: type = type(getattr(RuntimeConfig(), name))
    if kind is int and isinstance(value, float):
        raise ConfigError(f"{source}: {name} must be a whole number, not {value!r}")
    try:
        checked = RuntimeConfig(**{name: value})
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return kind(getattr(checked, name))


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    cwd: str | Path,
    find_allocation: Callable[[Mapping[str, str]], Allocation | None] | None = None,
) -> LaunchOptions:
    """Read a command line, the environment and the file that they name.

    Everything after the script, module or command belongs to it and stays unread.

    Args:
        argv: The arguments without the program's name.
        environ: The environment of the launcher.
        cwd: The folder to which relative paths are relative.
        find_allocation: Finds the job of a scheduler in the environment; None for no scheduler.

    Example:
        >>> words = ["-n", "2", "-m", "train", "-n", "3"]
        >>> options = parse(words, {"SYNCVAR_LAUNCH_OUTPUT": "first"}, "/")
        >>> options.ranks.workers, options.program.target, options.program.args
        (2, 'train', ('-n', '3'))
        >>> options.origin["workers"], options.origin["output"], options.origin["bind"]
        ('command line', 'environment', 'default')
    """
    base = Path(cwd)
    line = read_command_line(argv)
    layers = _Layers(line.values, environ, base)
    values, origin = layers.values, layers.origin
    more = tuple(_later_program(one, layers, environ) for one in line.more)
    layers.later_workers = sum(one.workers for one in more)

    join = _join_options(layers, environ)
    join.validate(origin, [word for one in (line, *line.more) for word in one.words])
    hosts = _host_options(layers, environ, find_allocation)
    _apply_color_variables(values, origin, environ)
    runtime = _runtime(layers, environ)
    if values["debug"] is not None:
        runtime = _with_debug_settings(runtime, origin)
    program = ProgramOptions(
        kind=line.kind,
        target=line.words[0] if line.words else "",
        args=tuple(line.words[1:]),
        **{**layers.fields("program"), "cwd": layers.path("cwd") or base},
        more=more,
    )
    fewest = _take_range(values)
    if values["workers"]:  # else the first program takes the slots that the others leave
        values["workers"] += layers.later_workers
    options = LaunchOptions(
        program=program,
        ranks=RankOptions(**layers.fields("ranks"), fewest=fewest),
        hosts=hosts,
        join=join,
        output=OutputOptions(**layers.fields("output")),
        limits=LimitOptions(**layers.fields("limits")),
        runtime=runtime,
        origin=origin,
    )
    options.validate()
    line.check_target(
        program.cwd, may_be_empty=join.address is not None, is_local=not options.has_hosts
    )
    return options


def _take_range(values: dict[str, Any]) -> int:
    """Replace MIN:MAX by the number of processes; return MIN, or 0 for a plain number."""
    workers = values["workers"]
    if not isinstance(workers, WorkerRange):
        return 0
    values["workers"] = workers.most + values["spares"]
    return workers.fewest


def _later_program(part: CommandLine, layers: _Layers, environ: Mapping[str, str]) -> RankProgram:
    """Return a program after the first one; it has the job's variables and its own."""
    own = env_variables(part.values.get("env", ()), environ, "command line")
    return RankProgram(
        kind=part.kind,
        target=part.words[0] if part.words else "",
        args=tuple(part.words[1:]),
        env={**layers.shared_env, **own},
        workers=part.values.get("workers", 1),
    )


class _Layers:
    """The values of all options by key, and their sources; paths are relative to `base`."""

    def __init__(self, line: dict[str, Any], environ: Mapping[str, str], base: Path) -> None:
        self.base = base
        self.line = line
        self.values: dict[str, Any] = {}
        self.origin: dict[str, str] = {}
        self.shared_env: dict[str, str] = {}  # variables of all programs, not from the command line
        self.later_workers = 0  # number of ranks of the programs after the first one
        variables_layer = _environment_layer(environ)
        path = line.get("config") or variables_layer.get("config")
        file_layer, self.file_settings = read_config_file(base / path) if path else ({}, {})
        layers = zip(_LAYERS[1:], (file_layer, variables_layer, line), strict=True)
        self._merge(tuple(layers), environ)
        for key in ("config", "log_dir", "events", "host_discovery"):
            self.values[key] = self.path(key)
        self.values["dashboard"] = self.values["dashboard"] or ""
        stats = self.values["stats"]
        self.values["stats"] = base / stats if isinstance(stats, str) else bool(stats)

    def _merge(self, layers: Any, environ: Mapping[str, str]) -> None:
        env: dict[str, str] = {}
        for option in OPTIONS:
            if option.setting:
                continue
            self.values[option.key], self.origin[option.key] = option.default, "default"
            for source, layer in layers:
                if option.key not in layer:
                    continue
                self.values[option.key], self.origin[option.key] = layer[option.key], source
                if option.key == "env":
                    chosen = env_variables(layer["env"], environ, source)
                    self.shared_env |= chosen if source != "command line" else {}
                    env |= chosen
                    self.origin |= {f"env.{name}": source for name in chosen}
        self.values["env"] = env

    def path(self, key: str) -> Path | None:
        """Return the absolute path that an option names, or None."""
        text = self.values[key]
        return None if text is None else self.base / text

    def fields(self, section: str) -> dict[str, Any]:
        """Return the fields of one record with their values."""
        return {one.field_name: self.values[one.key] for one in OPTIONS if one.section == section}


def _environment_layer(environ: Mapping[str, str]) -> dict[str, Any]:
    for name in environ:
        if name.startswith(LAUNCH_PREFIX) and name not in BY_VARIABLE:
            key = name.removeprefix(LAUNCH_PREFIX).lower()
            raise ConfigError(f"unknown variable {name}{setting_hint(key, name, BY_VARIABLE)}")
    return {
        option.key: read_value(option, environ[name], name, is_text=True)
        for name, option in BY_VARIABLE.items()
        if name in environ
    }


def _join_options(layers: _Layers, environ: Mapping[str, str]) -> JoinOptions:
    fields = layers.fields("join")
    default = Path(environ.get("HOME", "/")) / _KEY_FILE
    fields["key_file"] = layers.path("key_file") or default
    is_counted = fields["listen"] is not None and fields["address"] is None
    count = host_count_of(layers.values["hosts"]) if is_counted else None
    return JoinOptions(**fields, host_count=count)


def _host_options(
    layers: _Layers,
    environ: Mapping[str, str],
    find_allocation: Callable[[Mapping[str, str]], Allocation | None] | None,
) -> HostOptions:
    """Return the options for hosts; also set workers and the origins of both from the hosts."""
    values, origin = layers.values, layers.origin
    is_searched = (
        values["allocation"] == "auto"
        and values["host_discovery"] is None
        and values["fake_hosts"] == 1
        and values["listen"] is None
        and values["join"] is None
    )
    job = find_allocation(environ) if is_searched and find_allocation is not None else None
    entries: tuple[Host, ...] = ()
    notices: tuple[str, ...] = ()
    has_names = any(values[key] is not None for key in ("hosts", "hostfile", "include", "exclude"))
    if values["listen"] is None and (has_names or job is not None):
        entries, notices = _select_hosts(values, layers.base, job)
    if values["hostfile"] is not None:
        origin["hosts"] = origin["hostfile"]
    elif job is not None and values["hosts"] is None:
        origin["hosts"] = entries[0].origin
        if len(entries) == 1 and entries[0].name == job.here:  # the same as on one host
            if origin["workers"] == "default":
                own = max(1, (entries[0].slots or 1) - layers.later_workers)
                values["workers"], origin["workers"] = own, entries[0].origin
            entries, job = (), None
    if origin["ssh"] != "default" or values["ssh_always"]:
        job = None  # ssh leads to its hosts
    if (entries or values["listen"] is not None) and origin["workers"] == "default":
        values["workers"] = 0  # all slots, as many as they turn out to be
    fields = {**layers.fields("hosts"), "entries": entries, "ssh": _split_words(values["ssh"])}
    return HostOptions(**fields, notices=notices, scheduled=job)


def _select_hosts(
    values: Mapping[str, Any], base: Path, job: Allocation | None
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts to use, and notices; those of a scheduler's job limit the choice."""
    from syncvar_launcher.options.hostfile import parse_hosts, select_named  # only several hosts

    hostfile, listed = values["hostfile"], values["hosts"]
    include, exclude = values["include"], values["exclude"]
    if hostfile is None and listed is None:
        if job is not None:
            return select_named(job.hosts, include, exclude), ()
        option = "--include" if include is not None else "--exclude"
        raise ConfigError(
            f"{option} selects among the hosts of --hostfile or -H, and there are none"
        )
    if hostfile is not None and listed is not None:
        raise ConfigError(
            f"--hostfile {hostfile} and -H {listed} both name hosts; leave one out "
            "(--include selects)"
        )
    found = parse_hosts(listed) if listed is not None else _read_hostfile(base, hostfile)
    named = select_named(found.hosts, include, exclude)
    if job is not None:
        hosts, notices = restrict_hosts(job, named)
        return hosts, (*found.notices, *notices)
    if listed is not None:  # as for mpirun
        named = tuple(one._replace(slots=one.slots or 1) for one in named)
    return named, found.notices


def _read_hostfile(base: Path, name: str) -> Hosts:
    from syncvar_launcher.options.hostfile import parse_hostfile

    path = base / name
    try:
        with path.open("rb") as file:
            content = file.read(_HOSTFILE_NBYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"--hostfile {path}: {error.strerror}") from None
    if len(content) > _HOSTFILE_NBYTES_MAX:
        raise ConfigError(
            f"--hostfile {path}: it has more than {_HOSTFILE_NBYTES_MAX} bytes; is it a host file?"
        )
    return parse_hostfile(content, name)


def restrict_hosts(
    allocation: Allocation, named: Sequence[Host]
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts of an allocation that a host file or -H names, and notices for the user.

    A file can remove hosts and slots and adds nothing. The order is the file's.
    """
    known = {short_name(one.name): one for one in allocation.hosts}
    hosts, notices = [], []
    for one in named:
        found = known.get(short_name(one.name))
        if found is None:
            names = ", ".join(each.name for each in allocation.hosts)
            raise ConfigError(
                f"{one.origin} names {one.name}, which is not in {allocation.name} ({names}); "
                "leave it out, or give --allocation off"
            )
        slots, most = found.slots or 1, found.max_slots or found.slots or 1
        if one.slots is not None and one.slots > most:
            notices.append(
                f"{one.origin} gives {one.name} {one.slots} slots, and {allocation.name} has "
                f"{most} there: {most} count"
            )
        hosts.append(
            one._replace(
                name=found.name,
                slots=min(one.slots, most) if one.slots is not None else slots,
                max_slots=min(one.max_slots, most) if one.max_slots else None,
                origin=f"{one.origin}, within {found.origin}",
            )
        )
    return tuple(hosts), tuple(notices)


def _split_words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--ssh {text}: it cannot be split into words: {error}") from None


def _apply_color_variables(
    values: dict[str, Any], origin: dict[str, str], environ: Mapping[str, str]
) -> None:
    # As no-color.org asks: these variables count unless our own option or variable is set.
    if origin["color"] in ("command line", "environment"):
        return
    if environ.get("NO_COLOR"):
        values["color"], origin["color"] = "never", "environment"
    elif environ.get("FORCE_COLOR", "0") not in ("", "0"):
        values["color"], origin["color"] = "always", "environment"


def _runtime(layers: _Layers, environ: Mapping[str, str]) -> RuntimeConfig:
    origin, values = layers.origin, dict(layers.file_settings)
    origin |= dict.fromkeys(RuntimeConfig.names(), "default") | dict.fromkeys(values, "file")
    for name in RuntimeConfig.names():
        variable = PREFIX + name.upper()
        if variable in environ:
            try:
                config = RuntimeConfig.from_mapping({variable: environ[variable]})
            except ConfigError as error:
                raise ConfigError(f"{variable}: {error}") from None
            values[name], origin[name] = getattr(config, name), "environment"
    for option in OPTIONS:
        if option.setting and option.key in layers.line:
            value = layers.line[option.key]
            values[option.setting] = ("on" if value else "off") if option.is_switch else value
            origin[option.setting] = "command line"
    runtime = RuntimeConfig(**values).consistent()
    if runtime.uses_mpi:
        raise ConfigError(
            f"transport {runtime.transport} is for processes of MPI, and syncvar-launch starts "
            "none: start the script with mpirun"
        )
    paths: dict[str, Any] = {
        name: str(layers.base / getattr(runtime, name))
        for name in _PATH_SETTINGS
        if getattr(runtime, name)
    }
    return runtime.replaced(**paths)


def _with_debug_settings(runtime: RuntimeConfig, origin: dict[str, str]) -> RuntimeConfig:
    # A setting from a source nearer to the command line than `--debug` keeps its value.
    below = _LAYERS[: _LAYERS.index(origin["debug"])]
    values = {name: value for name, value in _DEBUG_SETTINGS.items() if origin[name] in below}
    origin |= dict.fromkeys(values, origin["debug"])
    return runtime.replaced(**values)
