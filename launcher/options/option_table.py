"""What to launch and how: one table of options feeds the command line, the variables, the file and the help.

A value comes from the command line, else from a variable (`SYNCVAR_LAUNCH_<OPTION>`, and `SYNCVAR_<KNOB>` for the
knobs of the runtime), else from the tables `[launch]` and `[runtime]` of a TOML file, else it is the default. Where
each value came from is kept, so that `--dry-run` can show it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from syncvar.bootstrap.launch_env.detection import started_with_others
from syncvar.core import exit_codes
from syncvar.core.environment import PREFIX, RankEnvironment
from syncvar.core.errors import ConfigError
from syncvar.core.host_topology import divided
from syncvar.core.settings import RuntimeConfig, nearest
from syncvar.shm.host_limits import core_quota
from syncvar_launcher.hosts.placement import MAP_BY
from syncvar_launcher.io import output
from syncvar_launcher.local import affinity
from syncvar_launcher.local import start_method as beginning
from syncvar_launcher.options import forwarded_signals
from syncvar_launcher.options.worker_environment import check_assignment, variables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from syncvar_launcher.options.hostfile import Host
    from syncvar_launcher.schedulers.allocation import Allocation

__all__ = [
    "LAUNCH_PREFIX",
    "LaunchOptions",
    "check_debugged",
    "core_count",
    "help_text",
    "host_keys",
    "hosts_help_text",
    "launch_keys",
    "parse",
    "usable_cores",
    "version_text",
]

LAUNCH_PREFIX = PREFIX + "LAUNCH_"

_PROGRAM = "syncvar-launch"
_CONTRACT = frozenset(RankEnvironment(0, 1, 0, 1, 0, 1, 0, "", "").to_mapping())
_KNOBS = frozenset(PREFIX + name.upper() for name in RuntimeConfig.names())
_WORDS = {
    "1": True,
    "true": True,
    "yes": True,
    "on": True,
    "0": False,
    "false": False,
    "no": False,
    "off": False,
}

_MOST = 1 << 16
"""The most ranks, fake hosts and cores: far more than a host can have, and no more than lists may be long."""

_HOSTFILE_MAX = 1 << 20
_KEY_FILE = ".syncvar-key"
_JOBS = ("SLURM_JOB_ID", "SLURM_JOBID", "LSB_JOBID", "PBS_JOBID")
_LAYERS = ("default", "file", "environment", "command line")

# What `--debug` sets, as configs/debug.toml does. Deadlines are endless: a person at a breakpoint is not a failure. The
# graces and the shutdown stay finite, because they run only once a job ends, and a failed job must end.
_DEBUGGED: dict[str, Any] = {
    "rendezvous_timeout_s": math.inf,
    "handshake_timeout_s": math.inf,
    "suspect_after_s": math.inf,
    "lost_after_s": math.inf,
    "stall_warning_s": math.inf,
    "collective_timeout_s": math.inf,
    "check_shm": "on",
}


class LaunchOptions(NamedTuple):
    """Everything that one start of a job is told.

    Args:
        kind: What `target` is: "script", "module" or "command".
        target: The script, module or command to run.
        args: Its arguments, untouched.
        workers: How many ranks, at least 1 ("auto" is resolved).
        fake_hosts: As how many hosts this machine poses, at least 1.
        hosts: On which hosts, as they were named; none for this machine alone.
        notices: What is to be said of how they were named.
        allocation: "auto": take the hosts of a scheduler's job, if the launcher runs in one. "off": do not.
        scheduled: The job that starts what is on them; None where ssh does.
        map_by: "slot" or "host": whether a host is filled before the next one gets workers.
        ssh: The program that leads to other hosts, with its own options.
        ssh_port: The port of ssh where a host names none; None for its own choice.
        remote_python: The interpreter there where a host names none; None for this one's path.
        iface: Which interfaces and networks the links between hosts use; None for those that serve.
        ssh_always: Go through ssh to this machine too.
        listen: The address at which hosts join, perhaps with a port; None where they are named.
        servers: How many processes hold variables for the workers.
        server_replicas: On how many other servers each one's variables have copies, fewer than `servers`.
        host_count: How many hosts are to join; None for as many as offer slots for all workers.
        join: The launcher that this host joins, with the port; None to launch.
        key_file: Where the key is by which hosts join, absolute.
        slots: For how many workers this host has place where it joins; None for one for each usable core.
        stage: Copy the script's folder to the hosts, and start the ranks in the copy.
        env: Variables to set for every rank.
        env_clear: The ranks inherit no other variables than those of an allow-list.
        cwd: The folder in which the ranks start, absolute.
        log_dir: The folder for one file for each rank and stream, absolute, or None.
        output: Whose lines are shown while the job runs: "all", "first", "failed", "none" or ranks such as "0,3-5".
        events: The file to which what happens is appended, absolute, or None.
        stats: Show totals of all calls at the end: as a table, or as JSON in a file, absolute.
        timestamps: Put the local time before each line.
        color: "auto", "always" or "never"; ask `color_on`.
        timeout_s: The time limit of the whole job, in seconds; infinite for none.
        forward_signals: The signals that are passed on to all ranks, as `signals.forwarded` reads them.
        max_restarts: How often all ranks may be started again after a failure.
        start_method: How a worker begins: "spawn" (a fresh interpreter), "fork" (of one that has imported NumPy and
            syncvar) or "auto" (`plan_beginning` decides).
        bind: "auto", "none" or "cores".
        cores_per_worker: Cores of each worker, or None for an equal share.
        torch_env: Also set MASTER_ADDR and MASTER_PORT.
        debug: The rank that gets the terminal, or None.
        dry_run: Show what would be done, and do nothing.
        config: The file that was read, absolute, or None.
        verbose: Say more.
        runtime: The knobs of the runtime.
        origin: For each option (by its key) and knob: "command line", "environment", "file" or "default"; also
            "env.NAME" for each variable of `env`.
    """

    kind: str
    target: str
    args: tuple[str, ...]
    workers: int
    servers: int
    server_replicas: int
    fake_hosts: int
    hosts: tuple[Host, ...]
    notices: tuple[str, ...]
    allocation: str
    scheduled: Allocation | None
    map_by: str
    ssh: tuple[str, ...]
    ssh_port: int | None
    remote_python: str | None
    iface: str | None
    ssh_always: bool
    listen: str | None
    host_count: int | None
    join: str | None
    key_file: Path
    slots: int | None
    stage: bool
    env: Mapping[str, str]
    env_clear: bool
    cwd: Path
    log_dir: Path | None
    output: str
    events: Path | None
    stats: bool | Path
    timestamps: bool
    color: str
    timeout_s: float
    forward_signals: str
    max_restarts: int
    start_method: str
    bind: str
    cores_per_worker: int | None
    torch_env: bool
    debug: int | None
    dry_run: bool
    config: Path | None
    verbose: bool
    runtime: RuntimeConfig
    origin: Mapping[str, str]

    def color_on(self, is_terminal: bool) -> bool:
        """Return whether to colour what goes to a file or terminal.

        Args:
            is_terminal: It is a terminal.
        """
        return is_terminal if self.color == "auto" else self.color == "always"

    @property
    def has_hosts(self) -> bool:
        """The workers run where agents start them: on hosts that were named, or that join."""
        return bool(self.hosts) or self.listen is not None


class _Option(NamedTuple):
    """One option: its spelling, its value and its words."""

    key: str
    flags: tuple[str, ...]
    group: str
    text: str
    kind: str  # how the value is read, see _read
    metavar: str = ""
    default: Any = None
    choices: tuple[str, ...] = ()
    knob: str = ""  # the knob of the runtime that it sets; then it has no key in a file and no variable of its own
    in_file: bool = True
    shown: str = ""  # its spelling in the help

    @property
    def is_switch(self) -> bool:
        return self.kind == "switch"


_RUN, _WORKERS, _HOSTS, _OUTPUT, _LIMITS = (
    "What to run",
    "Workers",
    "Several hosts",
    "Output",
    "Limits",
)
_ASIDE = ""  # told in another line, or with the options for several hosts

_OPTIONS = (
    _Option(
        "env", ("-x", "--env"), _RUN, "set a variable of all ranks, or copy ours (repeat)", "variables", "NAME[=V]|PRE*", {},
        shown="-x, --env NAME[=V]|PRE*",
    ),
    _Option("env_clear", ("--env-clear",), _RUN, "of ours only PATH, HOME and such, and what -x names", "switch", default=False),
    _Option("cwd", ("--cwd",), _RUN, "start the ranks in this folder", "folder", "DIR"),
    _Option("config", ("--config",), _RUN, "read [launch] and [runtime] from a TOML file", "path", "FILE", in_file=False),
    _Option("dry_run", ("--dry-run",), _RUN, "show what would be done, and do nothing", "switch", default=False),
    _Option(
        "workers", ("-n", "-np", "--nproc-per-node", "--workers"), _WORKERS, "how many ranks; auto: one per usable core",
        "workers", "N|auto", 1, shown="-n, -np, --workers N|auto",
    ),
    _Option("servers", ("--servers",), _WORKERS, "hold variables; twice by --server-replicas 1", "many", "N", 0),
    _Option("server_replicas", ("--server-replicas",), _ASIDE, "copies of each on other servers", "many", "K", 0),
    _Option(
        "fake_hosts", ("--fake-hosts",), _ASIDE, "pose as K hosts joined by tcp, for tests", "count", "K", 1,
    ),
    _Option("hostfile", ("--hostfile",), _HOSTS, "hosts and slots, one a line", "path", "FILE"),
    _Option("hosts", ("-H", "--hosts"), _HOSTS, "hosts and slots: a:2,b:2", "text", "LIST"),
    _Option("allocation", ("--allocation",), _HOSTS, "take those of the Slurm, PBS or LSF job", "choice", "HOW", "auto", ("auto", "off")),
    _Option("include", ("--include",), _HOSTS, "use these of them only", "text", "LIST"),
    _Option("exclude", ("--exclude",), _HOSTS, "do not use these", "text", "LIST"),
    _Option("map_by", ("--map-by",), _HOSTS, "fill each, or deal in turns", "choice", "HOW", "slot", MAP_BY),
    _Option("ssh", ("--ssh",), _HOSTS, "what leads there", "text", "CMD", "ssh"),
    _Option("ssh_port", ("--ssh-port",), _HOSTS, "its port, where the file names none", "port", "PORT"),
    _Option("ssh_always", ("--ssh-always",), _HOSTS, "go through ssh to this machine too", "switch", default=False),
    _Option("remote_python", ("--remote-python",), _HOSTS, "the interpreter there", "text", "PATH"),
    _Option(
        "encryption", ("--encryption",), _HOSTS, "of links", "choice", "HOW", choices=("required", "control-only", "off"), knob="encryption",
    ),
    _Option("insecure", ("--insecure",), _HOSTS, "lets encryption be off, for isolated networks", "switch", knob="insecure"),
    _Option("iface", ("--iface",), _HOSTS, "eth0, ^docker0 or 10.0.0.0/8", "text", "LIST"),
    _Option("stage", ("--stage",), _HOSTS, "copy the script's folder there first", "switch", default=False),
    _Option("listen", ("--listen",), _HOSTS, "wait here for --hosts N that join, no ssh", "address", "ADDR[:PORT]"),
    _Option("join", ("--join",), _HOSTS, "join a job that listens, with this host", "address", "HOST:PORT", in_file=False),
    _Option("key_file", ("--key-file",), _HOSTS, "by which they join [~/.syncvar-key]", "path", "FILE"),
    _Option("slots", ("--slots",), _HOSTS, "with --join: its place for workers [cores]", "count", "K"),
    _Option(
        "start_method", ("--start-method",), _WORKERS, "fresh, or forked from one", "choice", "HOW", "auto", beginning.METHODS,
    ),
    _Option("bind", ("--bind",), _WORKERS, "cores of its own for each", "choice", "MODE", "auto", affinity.MODES),
    _Option("cores_per_worker", ("--cores-per-worker",), _WORKERS, "cores and BLAS threads of each worker", "count", "K"),
    _Option("torch_env", ("--torch-env",), _WORKERS, "also set MASTER_ADDR and MASTER_PORT", "switch", default=False),
    _Option("debug", ("--debug",), _WORKERS, "give it the terminal, make deadlines endless", "rank", "RANK"),
    _Option(
        "output", ("--output",), _OUTPUT, f"show {', '.join(output.MODES)}, or ranks 0,3-5", "output", "WHICH", "all",
    ),
    _Option("log_dir", ("--log-dir",), _OUTPUT, "write one file for each rank and stream", "folder", "DIR"),
    _Option("events", ("--events",), _OUTPUT, "append what happens to the job as JSON lines", "folder", "FILE"),
    _Option(
        "stats", ("--stats",), _OUTPUT, "totals of all calls at the end, as a table or JSON", "stats", "yes|FILE", None,
        shown="--stats[=FILE]",
    ),
    _Option("timestamps", ("--timestamps",), _OUTPUT, "put the local time before each line", "switch", default=False),
    _Option("color", ("--color",), _OUTPUT, "colour the prefixes", "choice", "WHEN", "auto", ("auto", "always", "never")),
    _Option("verbose", ("-v", "--verbose"), _OUTPUT, "say more about what the launcher does", "switch", default=False),
    _Option("timeout", ("--timeout",), _LIMITS, "end the whole job after S seconds", "limit", "S", math.inf),
    _Option(
        "forward_signals", ("--forward-signals",), _LIMITS, "to ranks that handle them", "signals", "LIST", forwarded_signals.DEFAULT,
    ),
    _Option("max_restarts", ("--max-restarts",), _LIMITS, "start all again when one fails", "many", "K", 0),
    _Option(
        "start_timeout", ("--start-timeout",), _LIMITS, "longest wait for all ranks to meet", "seconds", "S",
        knob="rendezvous_timeout_s",
    ),
    _Option(
        "grace", ("--grace",), _LIMITS, "time between SIGTERM and SIGKILL", "seconds", "S", knob="term_grace_s",
    ),
    _Option(
        "preempt_grace", ("--preempt-grace",), _LIMITS, "the same for ranks that save first", "seconds", "S",
        knob="preempt_grace_s",
    ),
)  # fmt: skip

_BY_FLAG = {flag: option for option in _OPTIONS for flag in option.flags}
_OFF = {f"--no-{option.key.replace('_', '-')}": option for option in _OPTIONS if option.is_switch}
_OTHER_FLAGS = ("-m", "--no-python", "-h", "--help", "--help-hosts", "--version")
_IN_ENVIRONMENT = {
    LAUNCH_PREFIX + option.key.upper(): option for option in _OPTIONS if not option.knob
}
_IN_FILE = {option.key: option for option in _OPTIONS if option.in_file and not option.knob}


def launch_keys() -> tuple[str, ...]:
    """Return the keys that the table `[launch]` of a file may have."""
    return tuple(_IN_FILE)


def host_keys() -> tuple[str, ...]:
    """Return those of `launch_keys` that are about several hosts."""
    return tuple(option.key for option in _IN_FILE.values() if option.group == _HOSTS)


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may use, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def core_count() -> int:
    """Return for how many cores there is work: those that this process may use, or fewer where its container says so.

    A container's limit is one of time, not of certain cores: nothing is bound because of it.
    """
    return min(len(usable_cores()), core_quota() or sys.maxsize)


def version_text() -> str:
    """Return the program with its version."""
    # This import costs more than the rest of the parser, and one option needs it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return f"{_PROGRAM} {version('syncvar')}"
    except PackageNotFoundError:
        return f"{_PROGRAM} (not installed)"


def parse(argv: Sequence[str], environ: Mapping[str, str], cwd: str | Path) -> LaunchOptions:
    """Read a command line, the environment and the file that they name.

    Everything after the script, module or command belongs to it and is not looked at.

    Args:
        argv: The arguments without the program's name.
        environ: The environment of the launcher.
        cwd: The folder from which relative paths count.

    Raises:
        ConfigError: A variable, the file, or values together are wrong; the message names them.
        SystemExit: 2 after a message on the standard error: the command line is wrong. 0 after help or version.

    Example:
        >>> options = parse(["-n", "2", "-m", "train", "-n", "3"], {"SYNCVAR_LAUNCH_OUTPUT": "first"}, "/")
        >>> options.workers, options.target, options.args, options.output
        (2, 'train', ('-n', '3'), 'first')
        >>> options.origin["workers"], options.origin["output"], options.origin["bind"]
        ('command line', 'environment', 'default')
    """
    base = Path(cwd)
    parser = _Parser()
    given, kind, rest = _split(parser, argv)
    line = {
        key: value for key, value in vars(parser.parse_args(given)).items() if value is not None
    }
    values: dict[str, Any] = {}
    origin: dict[str, str] = {}
    settings: dict[str, Any] = {}

    for name in environ:
        if name.startswith(LAUNCH_PREFIX) and name not in _IN_ENVIRONMENT:
            raise ConfigError(
                f"unknown variable {name}{_knob_hint(name.removeprefix(LAUNCH_PREFIX).lower(), name, _IN_ENVIRONMENT)}"
            )
    for name, option in _IN_ENVIRONMENT.items():
        if name in environ:
            settings[option.key] = _checked(option, environ[name], name, is_text=True)

    path = line.get("config") or settings.get("config")
    table, knobs = _read_file(base / path) if path else ({}, {})
    env: dict[str, str] = {}
    for option in _OPTIONS:
        if option.knob:
            continue
        layers = (("file", table), ("environment", settings), ("command line", line))
        values[option.key], origin[option.key] = option.default, "default"
        for source, layer in layers:
            if option.key not in layer:
                continue
            origin[option.key] = source
            values[option.key] = layer[option.key]
            if option.key == "env":
                chosen = variables(layer["env"], environ, source)
                env |= chosen
                origin |= {f"env.{name}": source for name in chosen}

    if values["server_replicas"] > 1:
        raise ConfigError(
            f"--server-replicas {values['server_replicas']}: one copy on another server is kept, or none (0)"
        )
    if values["server_replicas"] and values["servers"] < 2:
        raise ConfigError(
            f"--server-replicas 1: copies are kept on other servers, and there are {values['servers']}; give --servers 2 or more"
        )
    if values["servers"] > _MOST:
        raise ConfigError(f"--servers {values['servers']}: at most {_MOST} are possible")
    host_count = None
    if values["join"] is not None or values["listen"] is not None:
        from syncvar_launcher.options.join_options import (
            check_join,
            check_listen,
        )  # only hosts that join need it

        if values["join"] is not None:
            check_join(values, origin, rest)
        else:
            host_count = check_listen(values, origin)
    job = _allocation(values, environ)
    hosts, notices = _hosts(values, base, job) if values["listen"] is None else ((), ())
    if values["hostfile"] is not None:
        origin["hosts"] = origin["hostfile"]
    elif job is not None and values["hosts"] is None:
        origin["hosts"] = hosts[0].origin
        if len(hosts) == 1 and hosts[0].name == job.here:  # as anywhere else, on one host
            if origin["workers"] == "default":
                values["workers"], origin["workers"] = hosts[0].slots, hosts[0].origin
            hosts, job = (), None
    if origin["ssh"] != "default" or values["ssh_always"]:
        job = None  # its hosts, by ssh
    has_hosts = bool(hosts) or values["listen"] is not None
    if has_hosts and origin["workers"] == "default":
        values["workers"] = 0  # all slots, as many as they turn out to be
    _apply_color_habits(values, origin, environ)
    runtime = _runtime(line, environ, knobs, origin)
    paths: dict[str, Any] = {
        name: str(base / getattr(runtime, name))
        for name in ("trace", "auto_log", "auto_replay")
        if getattr(runtime, name)
    }
    runtime = runtime.replaced(**paths)
    try:
        output.shown_ranks(values["output"], values["workers"] or _MOST)
    except ConfigError as error:
        raise ConfigError(f"--output {values['output']} ({origin['output']}): {error}") from None
    if values["debug"] is not None:
        check_debugged(values["debug"], values["workers"] or _MOST)
        runtime = _debugged(runtime, origin)

    if hosts and values["fake_hosts"] > 1:
        raise ConfigError(
            "--fake-hosts poses, and --hostfile or -H name real hosts; leave one of them out"
        )
    if values["stage"] and origin["stage"] == "command line" and not has_hosts:
        raise ConfigError(
            "--stage copies the script to other hosts, and none are named: give --hostfile, -H or --listen, or leave it out"
        )
    if values["stage"] and values["cwd"] is not None:
        raise ConfigError(
            "--stage starts the ranks in the copy of the script's folder, and --cwd says otherwise: leave one of them out"
        )
    if not has_hosts:
        try:
            divided(values["workers"], values["fake_hosts"])
        except ConfigError as error:
            raise ConfigError(f"--fake-hosts {values['fake_hosts']}: {error}") from None

    folder = base / values["cwd"] if values["cwd"] is not None else base
    if not has_hosts and not folder.is_dir():  # elsewhere each host is asked
        if values["cwd"] is None:
            raise ConfigError(
                f"the current folder {folder} has been removed: start in another one, or give --cwd"
            )
        raise ConfigError(f"--cwd {folder}: there is no such folder")
    if not rest and values["join"] is None:
        parser.error(
            {
                "script": "nothing to run: give a script, -m module or --no-python command",
                "module": "-m needs the name of a module",
                "command": "--no-python needs a command",
            }[kind]
        )
    if kind == "script" and not has_hosts and rest:
        _check_script(parser, rest[0], folder)
    if kind == "command" and values["start_method"] == "fork":
        raise ConfigError(
            f"--start-method fork: {rest[0]} is a program of its own (--no-python), and only a Python script or module can be "
            f"forked from a process that has imported NumPy; use --start-method spawn"
        )
    return LaunchOptions(
        kind=kind,
        target=rest[0] if rest else "",
        args=tuple(rest[1:]),
        workers=values["workers"],
        servers=values["servers"],
        server_replicas=values["server_replicas"],
        fake_hosts=values["fake_hosts"],
        hosts=hosts,
        notices=notices,
        allocation=values["allocation"],
        scheduled=job,
        map_by=values["map_by"],
        ssh=_words(values["ssh"]),
        ssh_port=values["ssh_port"],
        remote_python=values["remote_python"],
        iface=values["iface"],
        ssh_always=values["ssh_always"],
        listen=values["listen"],
        host_count=host_count,
        join=values["join"],
        key_file=_key_file(values["key_file"], base, environ),
        slots=values["slots"],
        stage=values["stage"],
        env=env,
        env_clear=values["env_clear"],
        cwd=folder,
        log_dir=base / values["log_dir"] if values["log_dir"] is not None else None,
        output=values["output"],
        events=base / values["events"] if values["events"] is not None else None,
        stats=base / values["stats"] if isinstance(values["stats"], str) else bool(values["stats"]),
        timestamps=values["timestamps"],
        color=values["color"],
        timeout_s=values["timeout"],
        forward_signals=values["forward_signals"],
        max_restarts=values["max_restarts"],
        start_method=values["start_method"],
        bind=values["bind"],
        cores_per_worker=values["cores_per_worker"],
        torch_env=values["torch_env"],
        debug=values["debug"],
        dry_run=values["dry_run"],
        config=base / path if path else None,
        verbose=values["verbose"],
        runtime=runtime,
        origin=origin,
    )


def _key_file(text: str | None, base: Path, environ: Mapping[str, str]) -> Path:
    return base / text if text is not None else Path(environ.get("HOME", "/")) / _KEY_FILE


def _words(text: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"--ssh {text}: it cannot be split into words: {error}") from None


def _allocation(values: Mapping[str, Any], environ: Mapping[str, str]) -> Allocation | None:
    """Return the job of a scheduler whose hosts are to be used; None where there is none, or others start the processes in it."""
    is_asked = (
        values["allocation"] == "auto"
        and values["fake_hosts"] == 1
        and values["listen"] is None
        and values["join"] is None
    )
    if (
        not is_asked
        or not any(name in environ for name in _JOBS)
        or started_with_others(environ) is not None
    ):
        return None
    import socket

    from syncvar_launcher.schedulers.allocation import (
        allocation,  # only a job of a scheduler needs it
    )

    return allocation(environ, socket.gethostname(), lambda path: Path(path).read_text("utf-8"))


def _hosts(
    values: Mapping[str, Any], base: Path, job: Allocation | None
) -> tuple[tuple[Host, ...], tuple[str, ...]]:
    """Return the hosts of `--hostfile` or `-H`, or of a scheduler's job, without those that are not to be used, and what is to be said."""
    if job is not None and values["hostfile"] is None and values["hosts"] is None:
        from syncvar_launcher.options.hostfile import selected

        return selected(job.hosts, values["include"], values["exclude"]), ()
    if values["hostfile"] is None and values["hosts"] is None:
        given = [f"--{name}" for name in ("include", "exclude") if values[name] is not None]
        if given:
            raise ConfigError(
                f"{given[0]} selects among the hosts of --hostfile or -H, and there are none"
            )
        return (), ()
    from syncvar_launcher.options.hostfile import (
        parse_hostfile,
        parse_hosts,
        selected,
    )  # only several hosts need it

    if values["hostfile"] is not None and values["hosts"] is not None:
        raise ConfigError(
            f"--hostfile {values['hostfile']} and -H {values['hosts']} both name hosts; leave one out (--include selects)"
        )
    if values["hosts"] is not None:
        found = parse_hosts(values["hosts"])
    else:
        path = base / values["hostfile"]
        try:
            with path.open("rb") as file:
                content = file.read(_HOSTFILE_MAX + 1)
        except OSError as error:
            raise ConfigError(f"--hostfile {path}: {error.strerror}") from None
        if len(content) > _HOSTFILE_MAX:
            raise ConfigError(
                f"--hostfile {path}: it has more than {_HOSTFILE_MAX} bytes; is it a host file?"
            )
        found = parse_hostfile(content, values["hostfile"])
    named, notices = selected(found.hosts, values["include"], values["exclude"]), found.notices
    if job is None:
        if values["hosts"] is not None:  # as for mpirun
            named = tuple(one._replace(slots=one.slots or 1) for one in named)
        return named, notices
    from syncvar_launcher.schedulers.allocation import within

    kept, more = within(job, named)
    return kept, (*notices, *more)


# Reading the command line. argparse reads values and prints errors, but the border between our options and those of
# the script is found here: REMAINDER has changed its mind about `--` and about options before it between versions.


class _Parser(argparse.ArgumentParser):
    def __init__(self) -> None:
        super().__init__(prog=_PROGRAM, allow_abbrev=False, add_help=False)
        for option in _OPTIONS:
            if option.is_switch:
                self.add_argument(*option.flags, dest=option.key, action="store_const", const=True)
                off = f"--no-{option.key.replace('_', '-')}"
                self.add_argument(off, dest=option.key, action="store_const", const=False)
            else:
                action = "append" if option.kind == "variables" else "store"
                self.add_argument(
                    *option.flags, dest=option.key, action=action, type=_ArgumentType(option)
                )

    def error(self, message: str) -> NoReturn:
        self.exit(exit_codes.USAGE, f"{self.prog}: {message}\nSee {self.prog} --help.\n")


class _ArgumentType:
    """The type of an argument, for argparse."""

    def __init__(self, option: _Option) -> None:
        self._option = option

    def __call__(self, text: str) -> Any:
        try:
            if self._option.kind == "variables":
                check_assignment(text)  # the shell has split the words already
                return text
            return _read(self._option, text, is_text=True)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from None


def _split(parser: _Parser, argv: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Return our options (each value joined to its name), what is run, and all that belongs to it."""
    given: list[str] = []
    position = 0
    while position < len(argv):
        argument = argv[position]
        position += 1
        if argument == "--":
            return given, "script", list(argv[position:])
        if not argument.startswith("-") or argument == "-":
            return given, "script", list(argv[position - 1 :])
        name, equals, value = argument.partition("=")
        if argument in ("-h", "--help"):
            sys.stdout.write(help_text())
            parser.exit(0)
        if argument == "--help-hosts":
            sys.stdout.write(hosts_help_text())
            parser.exit(0)
        if argument == "--version":
            sys.stdout.write(version_text() + "\n")
            parser.exit(0)
        if argument == "--no-python":
            return given, "command", _without_dashes(argv[position:])
        if (
            name not in _BY_FLAG
            and name not in _OFF
            and name not in _OTHER_FLAGS
            and (text := _foreign(name))
        ):
            parser.error(f"unknown option {name}: {text}")
        if argument == "-m":
            return given, "module", list(argv[position:])
        if argument.startswith("-m") and argument[2:].replace(".", "").replace("_", "").isalnum():
            return given, "module", [argument[2:], *argv[position:]]
        if (
            name not in _BY_FLAG
            and name not in _OFF
            and argument[:2] in _BY_FLAG
            and argument[1] != "-"
        ):
            name, equals, value = argument[:2], "=", argument[2:]  # -n4
        option = _BY_FLAG.get(name) or _OFF.get(name)
        if option is None:
            parser.error(f"unknown option {name}{nearest(name, (*_BY_FLAG, *_OFF, *_OTHER_FLAGS))}")
        if option.is_switch:
            if equals:
                parser.error(f"{name} takes no value")
            given.append(name)
            continue
        if option.kind == "stats" and not equals:
            equals, value = "=", "yes"
        if not equals:
            if position == len(argv):
                parser.error(f"{name} needs a value: {name} {option.metavar}")
            value = argv[position]
            position += 1
        # Joined, so that argparse does not take a value with a dash for an option; -n=4 would hold the sign itself.
        given.append(f"{option.flags[-1]}={value}")
    return given, "script", []


def _foreign(name: str) -> str:
    """Return what to write instead of an option of another launcher; empty where it is none."""
    from syncvar.core.migration_hints import explained  # only an option that is not ours needs it

    return explained("option", name)


def _without_dashes(arguments: Sequence[str]) -> list[str]:
    return list(arguments[1:] if arguments and arguments[0] == "--" else arguments)


def _check_script(parser: _Parser, script: str, folder: Path) -> None:
    if _is_interpreter(folder / script):
        parser.error(
            f"{script} is no script: leave out {script}, because the launcher starts Python by "
            f"itself: syncvar-launch --workers 2 train.py"
        )
    if (folder / script).exists():
        return
    try:
        here = sorted(item.name for item in (folder / script).parent.iterdir())
    except OSError:
        here = []
    hint = nearest(Path(script).name, here)
    parser.error(
        f"there is no script {script} in {folder}{hint}; a module is started with -m, a command with --no-python"
    )


def _is_interpreter(path: Path) -> bool:
    """Return whether a path names Python itself: a program of that name, or no file at all."""
    if path.name.rstrip("0123456789.") not in ("python", "pypy"):
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"\x7fELF"
    except OSError:
        return not path.exists()


# Reading values.


def _read(option: _Option, value: Any, *, is_text: bool) -> Any:
    """Read one value; texts of a file are strict about types, those of a command line are parsed."""
    kind = option.kind
    if kind == "switch":
        word = _WORDS.get(value.lower()) if is_text else value
        if not isinstance(word, bool):
            raise ConfigError(f"must be true or false, not {value!r}")
        return word
    if kind == "choice":
        if value not in option.choices:
            raise ConfigError(
                f"must be one of {', '.join(option.choices)}, not {value!r}{nearest(str(value), option.choices)}"
            )
        return value
    if kind == "stats":
        word = _WORDS.get(value.lower()) if is_text else value
        if not isinstance(word, bool) and (
            not isinstance(value, str) or not value or "\0" in value
        ):
            raise ConfigError(f"must be yes, no or a path, not {value!r}")
        return word if isinstance(word, bool) else value
    if kind == "output":
        if not isinstance(value, str) or not (value in output.MODES or value[:1].isdigit()):
            raise ConfigError(
                f"must be one of {', '.join(output.MODES)}, or ranks such as 0,3-5, not {value!r}{nearest(str(value), output.MODES)}"
            )
        output.shown_ranks(value, _MOST)
        return value
    if kind in ("path", "folder"):
        if not isinstance(value, str) or not value or "\0" in value:
            raise ConfigError(f"must be a path, not {value!r}")
        return value
    if kind == "signals":
        if not isinstance(value, str):
            raise ConfigError(
                f"must be names of signals, such as {forwarded_signals.DEFAULT!r}, or 'none', not {value!r}"
            )
        forwarded_signals.forwarded(value)
        return value
    if kind in ("text", "address"):
        if not isinstance(value, str) or not value.strip() or not value.isprintable():
            raise ConfigError(f"must be a text, not {value!r}")
        if kind == "address":
            from syncvar_launcher.options.join_options import place_of  # likewise

            place_of(value)
        return value
    if kind == "variables":
        return _read_variables(value, is_text=is_text)
    if kind in ("seconds", "limit"):
        return _read_seconds(value, is_text=is_text, above_zero=kind == "limit")
    if kind == "workers" and value == "auto":
        return core_count()
    if kind == "port":
        return _read_whole(value, is_text=is_text, low=1, high=65535, also="")
    if kind in ("rank", "many"):
        return _read_whole(value, is_text=is_text, low=0, high=None, also="")
    return _read_whole(
        value, is_text=is_text, low=1, high=_MOST, also="auto or " if kind == "workers" else ""
    )


def _read_whole(value: Any, *, is_text: bool, low: int, high: int | None, also: str) -> int:
    number = (
        int(value)
        if is_text and value.isascii() and value.isdigit() and len(value) < 100
        else value
    )
    if isinstance(number, bool) or not isinstance(number, int) or number < low:
        raise ConfigError(f"must be {also}a whole number of at least {low}, not {value!r}")
    if high is not None and number > high:
        raise ConfigError(f"must be {also}a whole number of at most {high}, not {value!r}")
    return number


def _read_seconds(value: Any, *, is_text: bool, above_zero: bool) -> float:
    number = math.nan
    if is_text or (isinstance(value, int | float) and not isinstance(value, bool)):
        with contextlib.suppress(ValueError, OverflowError):
            number = float(value)
    if math.isnan(number) or number < 0 or (above_zero and number == 0):
        raise ConfigError(
            f"must be seconds {'above 0' if above_zero else 'of at least 0'}, not {value!r}"
        )
    return number


def _read_variables(value: Any, *, is_text: bool) -> list[str]:
    if is_text:
        import shlex  # a variable can hold several assignments, as a shell writes them

        try:
            value = shlex.split(value)
        except ValueError as error:
            raise ConfigError(f"cannot be read as NAME=value words: {error}") from None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f'must be a list such as ["NAME=value", "NAME"], not {value!r}')
    for item in value:
        check_assignment(item)
    return value


def _checked(option: _Option, value: Any, where: str, *, is_text: bool) -> Any:
    try:
        return _read(option, value, is_text=is_text)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _knob_hint(key: str, shown: str, known: Mapping[str, Any]) -> str:
    """Say where a short option for a knob has its home, or what was probably meant."""
    for option in _OPTIONS:
        if option.knob and key == option.key:
            return f": it sets {option.knob}, which is {PREFIX}{option.knob.upper()} or a key of [runtime]"
    return nearest(shown, known)


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8") from None
    import tomllib  # only a file needs it

    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: {error}") from None
    for name, table in document.items():
        if name not in ("launch", "runtime"):
            raise ConfigError(
                f"{path}: unknown table [{name}]{nearest(name, ('launch', 'runtime'))}"
            )
        if not isinstance(table, dict):
            raise ConfigError(f"{path}: {name} must be a table")
    launch: dict[str, Any] = {}
    for key, value in document.get("launch", {}).items():
        option = _IN_FILE.get(key)
        if option is None:
            known = "" if key in RuntimeConfig.names() else _knob_hint(key, key, _IN_FILE)
            raise ConfigError(
                f"{path}: unknown key {key!r} in [launch]{known or ': it belongs to [runtime]'}"
            )
        launch[key] = _checked(option, value, f"{path}: {key} in [launch]", is_text=False)
    knobs: dict[str, Any] = {}
    for key, value in document.get("runtime", {}).items():
        if key not in RuntimeConfig.names():
            hint = (
                ": it belongs to [launch]"
                if key in _IN_FILE
                else _knob_hint(key, key, dict.fromkeys(RuntimeConfig.names()))
            )
            raise ConfigError(f"{path}: unknown key {key!r} in [runtime]{hint}")
        knobs[key] = _checked_knob(key, value, f"{path}: [runtime]")
    return launch, knobs


def _checked_knob(name: str, value: Any, where: str) -> Any:
    kind: type = type(getattr(RuntimeConfig(), name))
    if kind is int and isinstance(value, float):
        raise ConfigError(f"{where}: {name} must be a whole number, not {value!r}")
    try:
        checked = RuntimeConfig(**{name: value})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    return kind(getattr(checked, name))


def _runtime(
    line: Mapping[str, Any],
    environ: Mapping[str, str],
    knobs: Mapping[str, Any],
    origin: dict[str, str],
) -> RuntimeConfig:
    values = dict(knobs)
    origin |= dict.fromkeys(RuntimeConfig.names(), "default") | dict.fromkeys(knobs, "file")
    for name in RuntimeConfig.names():
        variable = PREFIX + name.upper()
        if variable in environ:
            try:
                values[name] = getattr(
                    RuntimeConfig.from_mapping({variable: environ[variable]}), name
                )
            except ConfigError as error:
                raise ConfigError(f"{variable}: {error}") from None
            origin[name] = "environment"
    for option in _OPTIONS:
        if option.knob and option.key in line:
            value = ("on" if line[option.key] else "off") if option.is_switch else line[option.key]
            values[option.knob], origin[option.knob] = value, "command line"
    runtime = RuntimeConfig(**values).consistent()
    if runtime.uses_mpi:
        raise ConfigError(
            f"transport {runtime.transport} is for processes of MPI, and syncvar-launch starts none: start the script with mpirun"
        )
    return runtime


def check_debugged(rank: int | None, workers: int) -> None:
    """Check that there is the rank of `--debug`.

    Raises:
        ConfigError: There are too few workers.
    """
    if rank is not None and rank >= workers:
        others = "the only rank is 0" if workers == 1 else f"ranks are 0 to {workers - 1}"
        raise ConfigError(f"--debug {rank}: there is no such rank among {workers} ({others})")


def _debugged(runtime: RuntimeConfig, origin: dict[str, str]) -> RuntimeConfig:
    # As everywhere, what was said nearer to the command line wins: only such a setting stays beside `--debug`.
    below = _LAYERS[: _LAYERS.index(origin["debug"])]
    values = {name: value for name, value in _DEBUGGED.items() if origin[name] in below}
    origin |= dict.fromkeys(values, origin["debug"])
    return runtime.replaced(**values)


def _apply_color_habits(
    values: dict[str, Any], origin: dict[str, str], environ: Mapping[str, str]
) -> None:
    # As no-color.org asks: the variables count where nothing more particular was said on the line or in ours.
    if origin["color"] in ("command line", "environment"):
        return
    if environ.get("NO_COLOR"):
        values["color"], origin["color"] = "never", "environment"
    elif environ.get("FORCE_COLOR", "0") not in ("", "0"):
        values["color"], origin["color"] = "always", "environment"


# Help.


def help_text() -> str:
    """Return the help: examples first, then the options in groups, at most 80 columns wide."""
    lines = [
        "Examples:",
        f"  {_PROGRAM} --workers 4 train.py --lr 0.1        four ranks of a script",
        f"  {_PROGRAM} -n auto -m syncvar.examples.digits   one rank for each core",
        f"  {_PROGRAM} -n 4 --debug 2 train.py              rank 2 gets the terminal",
        f"Usage: {_PROGRAM} [options] script.py | -m module | --no-python command",
        "       Its arguments follow, and are passed on untouched; -- ends options.",
    ]
    for group in (_RUN, _WORKERS, _OUTPUT, _LIMITS):
        lines += ["", f"{group}:"]
        lines += [_help_line(option) for option in _OPTIONS if option.group == group]
        if group == _WORKERS:
            lines += [
                f"  {'--hostfile FILE, -H a:2,b:2':<27} workers on several hosts; see --help-hosts",
                "  Forked, they begin sooner with NumPy imported: set BLAS variables by --env.",
            ]
        if group == _RUN:
            lines += [f"  {'-h, --help, --version':<27}show this help, or the version"]
    lines += [
        "",
        f"Instead of --some-option: the variable {LAUNCH_PREFIX}SOME_OPTION, or the key",
        "some_option in the file. A switch set there is turned off by --no-some-option.",
        "",
        "Exit code: of the first rank that failed (128 + n for signal n), or 2 usage,",
        "69 hosts, 70 lost rank, 71 limits, 74 checkpoint, 75 preempted, 76 mismatch,",
        "77 key, 78 configuration, 124 timeout.",
    ]
    return "\n".join(lines) + "\n"


def hosts_help_text() -> str:
    """Return the help for several hosts: how they are named, and all options for them."""
    lines = [
        "Examples:",
        f"  {_PROGRAM} --hostfile hosts train.py             a rank for each slot",
        f"  {_PROGRAM} -H a:2,b:2 --workers 3 train.py       three of four slots",
        f"  {_PROGRAM} --hostfile hosts --dry-run train.py   says what it would do",
        "",
        "A line of a host file, with what is left out in brackets:",
        "  [user@]name[:slots] [slots=N] [max_slots=M] [port=P] [addr=A] [python=PATH] [cwd=DIR]",
        "name may be an address ([fd00::7] for IPv6) or stand for several: gpu[01-04,07].",
        "ssh goes to name, at port P; the other ranks reach it at A, where that differs.",
        "^name removes one; # begins a comment. Without slots: one for each usable core;",
        "in -H, as for mpirun, one for each time that the host is named.",
        "",
        f"{_HOSTS}:",
        *(
            _help_line(option)
            for option in _OPTIONS
            if option.group == _HOSTS or option.key == "fake_hosts"
        ),
        "",
        "Each host is logged in to by ssh, without a password (with --listen none is: each",
        "runs --join), and needs this version of syncvar for the same Python, the script at",
        "the same path or --stage, and open ports above 1023 to the others. Links between",
        "hosts are encrypted; --encryption control-only leaves the data as it is, and still",
        "lets nobody else in. What is wrong with any host is told before anything is started.",
    ]
    return "\n".join(lines) + "\n"


def _help_line(option: _Option) -> str:
    names = option.shown or f"{', '.join(option.flags)} {option.metavar}".rstrip()
    text = option.text
    if option.choices:
        text += f": {', '.join(option.choices)}"
    if isinstance(option.default, int | str) and not option.is_switch:
        text += f" [{option.default}]"
    if option.knob:
        default = next(item.default for item in RuntimeConfig.knobs() if item.name == option.knob)
        text += (
            ""
            if option.is_switch
            else f" [{default}]"
            if isinstance(default, str)
            else f" [{default:g} s]"
        )
    return f"  {names:<27}{text}"
