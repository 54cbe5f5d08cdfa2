"""The table of the launcher's options: the only place where an option is declared.

From a row come the parser, the help, docs/reference/syncvar-launch.md, the key of a TOML file, the
environment variable (`SYNCVAR_LAUNCH_<KEY>`) and the field of `LaunchOptions` for the value. To add
an option, add a row here, a field in `launch_options`, and a line in `configs/local.toml`.

The functions `read_...` each check one value and return it with its type. The command line and the
environment pass text (`is_text`), which a reader parses. A TOML file passes typed values, and a
reader accepts only the right type.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import shlex
import signal
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from syncvar.core.environment import PREFIX
from syncvar.core.errors import ConfigError
from syncvar.core.exit_status import signal_name
from syncvar.core.settings import RuntimeConfig, nearest
from syncvar.core.stack_dump import ALL_THREADS, MAIN_THREAD, WITHOUT_PYTHON
from syncvar.shm.host_limits import core_quota
from syncvar_launcher.options.worker_environment import check_assignment

if TYPE_CHECKING:
    from collections.abc import Sequence

PROGRAM = "syncvar-launch"
WRONG_OPTION = "SV-506"  # code of a wrong command line, file or variable of the launcher
LAUNCH_PREFIX = PREFIX + "LAUNCH_"

START_METHODS = ("auto", "spawn", "fork")
BIND_MODES = ("auto", "none", "cores")
MAP_BY = ("slot", "host")
_ENCRYPTION = ("required", "control-only", "off")
_COLOR = ("auto", "always", "never")

# Groups of the help.
RUN = "What to run"
WORKERS = "Workers"
HOSTS = "Several hosts"
OUTPUT = "Output"
LIMITS = "Limits"
ASIDE = ""  # for options that other lines of the help name

OUTPUT_MODES = ("all", "first", "failed", "none")
COUNT_MAX = 1 << 16
"""Upper limit of ranks, fake hosts and cores: beyond any host, and small enough for lists."""

_HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?")
_PORT_MAX = 65535
_LOOPBACK = "127.0.0.1"

_WORDS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}

FORWARDED_SIGNALS = "USR1,USR2,CONT"

_ENDS_JOB = "it ends the job: the launcher ends all ranks in order"
_FAULT = "it reports a fault of the process that gets it"
_FAULTS = (
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE),
    *(signal.SIGABRT, signal.SIGTRAP, signal.SIGSYS),
)
_STACK_REQUESTS = (MAIN_THREAD, ALL_THREADS, WITHOUT_PYTHON)
_NOT_FORWARDED: dict[int, str] = {
    signal.SIGKILL: "no process can handle it",
    signal.SIGSTOP: "no process can handle it",
    signal.SIGCHLD: "the system reports with it that a rank has ended",
    **dict.fromkeys((signal.SIGINT, signal.SIGTERM, signal.SIGHUP), _ENDS_JOB),
    signal.SIGPIPE: "it reports that nobody reads what the launcher writes, which ends the job",
    signal.SIGTSTP: "it stops the launcher, which stops all ranks",
    signal.SIGTTIN: "it stops a process that reads from a terminal in the background",
    signal.SIGTTOU: "it stops a process that writes to a terminal in the background",
    **dict.fromkeys(_STACK_REQUESTS, "a rank writes its Python stack when it gets it"),
    **dict.fromkeys(_FAULTS, _FAULT),
}


class OptionReader(Protocol):
    """A function that reads the value of one kind of option."""

    def __call__(self, value: Any, *, is_text: bool) -> Any:
        """Return the value, or raise ConfigError with a text that begins with "must be"."""
        ...


class Option(NamedTuple):
    """One option."""

    key: str  # name in a TOML file, and of the environment variable in lower case
    flags: tuple[str, ...]  # spellings on the command line; the last one is the long one
    group: str  # group of the help
    # record and its field, for instance "ranks.workers". "runtime.NAME" sets a runtime setting:
    # such an option has no key in a file and no variable of its own
    field: str
    read: OptionReader  # reader of a value
    metavar: str  # value's name in the help
    text: str  # help
    default: Any = None  # value without the option
    choices: tuple[str, ...] = ()  # allowed words, or none
    in_file: bool = True  # whether a TOML file may set it
    spelling: str = ""  # spelling in the help, where it is not that of the flags

    @property
    def section(self) -> str:
        """The attribute of `LaunchOptions` that holds the field."""
        return self.field.partition(".")[0]

    @property
    def field_name(self) -> str:
        """The field in its record."""
        return self.field.partition(".")[2]

    @property
    def setting(self) -> str:
        """The runtime setting, or empty."""
        return self.field_name if self.section == "runtime" else ""

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.read is read_switch

    @property
    def off_flag(self) -> str:
        """The spelling that turns a switch off."""
        return f"--no-{self.key.replace('_', '-')}"

    @property
    def usage(self) -> str:
        """The flags with the value, for help and documentation."""
        return self.spelling or f"{', '.join(self.flags)} {self.metavar}".rstrip()

    @property
    def description(self) -> str:
        """The help with the allowed words and the default."""
        text = f"{self.text}: {', '.join(self.choices)}" if self.choices else self.text
        if self.is_switch:
            return text
        if self.setting:
            settings = RuntimeConfig.runtime_settings()
            default = next(one.default for one in settings if one.name == self.setting)
            shown = default if isinstance(default, str) else f"{default:g} s"
            return f"{text} [{shown}]" if shown else text
        return f"{text} [{self.default}]" if isinstance(self.default, int | str) else text

    def value(self, raw: Any, *, is_text: bool) -> Any:
        """Return the checked value of text, or of a value of a TOML file."""
        if self.choices:
            return read_choice(raw, self.choices)
        return self.read(raw, is_text=is_text)


def read_choice(value: Any, choices: Sequence[str]) -> Any:
    """Return one of several words."""
    if value not in choices:
        raise ConfigError(
            f"must be one of {', '.join(choices)}, not {value!r}{nearest(str(value), choices)}"
        )
    return value


def read_switch(value: Any, *, is_text: bool) -> Any:
    """Return a boolean."""
    word = _WORDS.get(value.lower()) if is_text else value
    if not isinstance(word, bool):
        raise ConfigError(f"must be true or false, not {value!r}")
    return word


def read_stats(value: Any, *, is_text: bool) -> Any:
    """Return a boolean, or the path of a file."""
    word = _WORDS.get(value.lower()) if is_text else value
    if isinstance(word, bool):
        return word
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"must be yes, no or a path, not {value!r}")
    return value


def read_dashboard(value: Any, *, is_text: bool) -> Any:
    """Return the address of the dashboard, perhaps with a port; empty for none."""
    word = _WORDS.get(value.lower()) if is_text else value
    if isinstance(word, bool):
        return _LOOPBACK if word else ""
    return read_address(value, is_text=is_text)


def read_output(value: Any, *, is_text: bool) -> Any:  # noqa: ARG001  (the protocol has it)
    """Return a mode of `--output`, or ranks as text."""
    if not isinstance(value, str) or not (value in OUTPUT_MODES or value[:1].isdigit()):
        modes = ", ".join(OUTPUT_MODES)
        hint = nearest(str(value), OUTPUT_MODES)
        raise ConfigError(f"must be one of {modes}, or ranks such as 0,3-5, not {value!r}{hint}")
    shown_ranks(value, COUNT_MAX)
    return value


def read_path(value: Any, *, is_text: bool) -> Any:  # noqa: ARG001  (likewise)
    """Return a path as text."""
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigError(f"must be a path, not {value!r}")
    return value


def read_signals(value: Any, *, is_text: bool) -> Any:  # noqa: ARG001  (likewise)
    """Return a list of signals as text."""
    if not isinstance(value, str):
        names = FORWARDED_SIGNALS
        raise ConfigError(f"must be names of signals, such as {names!r}, or 'none', not {value!r}")
    parse_signals(value)
    return value


def read_text(value: Any, *, is_text: bool) -> Any:  # noqa: ARG001  (likewise)
    """Return a text that is not blank."""
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ConfigError(f"must be a text, not {value!r}")
    return value


def read_address(value: Any, *, is_text: bool) -> Any:
    """Return the text of an address, perhaps with a port."""
    parse_address(read_text(value, is_text=is_text))
    return value


def read_variables(value: Any, *, is_text: bool) -> Any:
    """Return a list of assignments; a text holds several, as in a shell."""
    if is_text:
        try:
            value = shlex.split(value)
        except ValueError as error:
            raise ConfigError(f"cannot be read as NAME=value words: {error}") from None
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f'must be a list such as ["NAME=value", "NAME"], not {value!r}')
    for item in value:
        check_assignment(item)
    return value


def read_seconds(value: Any, *, is_text: bool) -> Any:
    """Return seconds, at least 0."""
    number = _number_of(value, is_text=is_text)
    if not number >= 0:
        raise ConfigError(f"must be seconds of at least 0, not {value!r}")
    return number


def read_limit(value: Any, *, is_text: bool) -> Any:
    """Return seconds, above 0."""
    number = _number_of(value, is_text=is_text)
    if not number > 0:
        raise ConfigError(f"must be seconds above 0, not {value!r}")
    return number


def _number_of(value: Any, *, is_text: bool) -> float:
    if is_text or (isinstance(value, int | float) and not isinstance(value, bool)):
        with contextlib.suppress(ValueError, OverflowError):
            return float(value)
    return math.nan


class WorkerRange(NamedTuple):
    """The fewest and most workers of an elastic job."""

    fewest: int
    most: int


def read_workers(value: Any, *, is_text: bool) -> Any:
    """Return the number of ranks; "auto" is one for each usable core; MIN:MAX a `WorkerRange`."""
    if value == "auto":
        return core_count()
    if isinstance(value, str) and ":" in value:
        low, _, high = value.partition(":")
        most = core_count() if high == "auto" else read_count(high, is_text=True)
        fewest = read_count(low, is_text=True)
        if fewest > most:
            raise ConfigError(f"MIN:MAX needs MIN <= MAX, and {value!r} has {fewest} and {most}")
        return WorkerRange(fewest, most)
    return _read_whole(value, is_text=is_text, low=1, high=COUNT_MAX, also="auto, MIN:MAX or ")


def read_port(value: Any, *, is_text: bool) -> Any:
    """Return a port of TCP."""
    return _read_whole(value, is_text=is_text, low=1, high=_PORT_MAX)


def read_number(value: Any, *, is_text: bool) -> Any:
    """Return a whole number, at least 0."""
    return _read_whole(value, is_text=is_text, low=0)


def read_count(value: Any, *, is_text: bool) -> Any:
    """Return a whole number, at least 1."""
    return _read_whole(value, is_text=is_text, low=1, high=COUNT_MAX)


def _read_whole(
    value: Any, *, is_text: bool, low: int, high: int | None = None, also: str = ""
) -> int:
    is_number = is_text and value.isascii() and value.isdigit() and len(value) < 100
    number = int(value) if is_number else value
    if isinstance(number, bool) or not isinstance(number, int) or number < low:
        raise ConfigError(f"must be {also}a whole number of at least {low}, not {value!r}")
    if high is not None and number > high:
        raise ConfigError(f"must be {also}a whole number of at most {high}, not {value!r}")
    return number


def parse_signals(text: str) -> tuple[int, ...]:
    """Return the numbers of the signals to forward.

    `text` has names, with or without SIG, and numbers, with commas; or is "none".

    Example:
        >>> parse_signals("USR1,SIGUSR2,18"), parse_signals("none")
        ((10, 12, 18), ())
    """
    return (
        ()
        if text == "none"
        else tuple(dict.fromkeys(_signal_number(one.strip()) for one in text.split(",")))
    )


def _signal_number(text: str) -> int:
    if text.isascii() and text.isdigit() and len(text) < 4:
        number = int(text)
    else:
        named = signal.Signals.__members__.get("SIG" + text.upper().removeprefix("SIG"))
        number = 0 if named is None else int(named)
    if number not in signal.valid_signals():
        raise ConfigError(
            f"{text!r} is no signal: give names or numbers, such as {FORWARDED_SIGNALS}, or none"
        )
    if number in _NOT_FORWARDED:
        raise ConfigError(
            f"{signal_name(number) or number} cannot be passed on: {_NOT_FORWARDED[number]}"
        )
    return number


def usable_cores() -> tuple[int, ...]:
    """Return the cores that this process may use, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def core_count() -> int:
    """Return the number of usable cores, or the smaller quota of CPU time of the container.

    A quota limits time and names no cores, so the launcher binds nothing because of it.
    """
    return min(len(usable_cores()), core_quota() or sys.maxsize)


def shown_ranks(selection: str, workers: int) -> frozenset[int] | None:
    """Return the ranks whose lines the launcher shows while a job runs, or None for all.

    Args:
        selection: A mode of `--output`, or ranks such as "0,3-5". "failed" and "none" show no rank.
        workers: The number of ranks.

    Example:
        >>> sorted(shown_ranks("0,3-5", 8))
        [0, 3, 4, 5]
    """
    if selection == "all":
        return None
    if selection == "first":
        return frozenset({0})
    return frozenset() if selection in OUTPUT_MODES else ranks_of(selection, workers)


def ranks_of(text: str, most: int) -> frozenset[int]:
    """Return the ranks below `most` that a text such as "0-2,7" names, or raise ConfigError."""
    ranks: set[int] = set()
    for span in text.split(","):
        ends = [end.strip() for end in span.split("-")]
        is_valid = all(end.isascii() and end.isdigit() and len(end) < 100 for end in ends)
        if len(ends) > 2 or not is_valid:
            raise ConfigError(
                f"{span.strip()!r} is no rank, such as 3, and no span of ranks, such as 0-3"
            )
        first, last = int(ends[0]), int(ends[-1])
        if first > last:
            raise ConfigError(f"the span {span.strip()} ends before it begins")
        if last >= most:
            ranks_text = "the only rank is 0" if most == 1 else f"ranks are 0 to {most - 1}"
            raise ConfigError(f"there is no rank {last} among {most} ({ranks_text})")
        ranks.update(range(first, last + 1))
    return frozenset(ranks)


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ADDR, ADDR:PORT or [IPv6]:PORT; the port is 0 without one.

    Example:
        >>> parse_address("10.0.0.1:29400"), parse_address("node1"), parse_address("[fd00::7]:80")
        (('10.0.0.1', 29400), ('node1', 0), ('fd00::7', 80))
    """
    host, port = text, ""
    is_right = True
    if text.startswith("["):
        host, closing, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
        is_right = bool(closing) and ":" in host and (not rest or rest.startswith(":"))
    elif text.count(":") == 1:
        host, _, port = text.partition(":")
    if not is_ip_address(host):
        is_right = is_right and ":" not in host and _HOST_NAME.fullmatch(host) is not None
    if port:
        is_number = port.isascii() and port.isdigit() and len(port) < 6
        is_right = is_right and is_number and 1 <= int(port) <= _PORT_MAX
    if not is_right or text.endswith(":"):
        raise ConfigError(
            f"must be an address such as 10.0.0.1, 10.0.0.1:29400 or [fd00::7]:29400, not {text!r}"
        )
    return host, int(port or 0)


def is_ip_address(text: str) -> bool:
    """Return whether a text is an address of IPv4 or IPv6."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


OPTIONS = (
    Option("env", ("-x", "--env"), RUN, "program.env", read_variables, "NAME[=V]|PRE*",
           "set a variable of the ranks, or copy ours (repeat)", {},
           spelling="-x, --env NAME[=V]|PRE*"),
    Option("env_clear", ("--env-clear",), RUN, "program.env_clear", read_switch, "",
           "pass only PATH, HOME and such, and those of -x", default=False),
    Option("cwd", ("--cwd",), RUN, "program.cwd", read_path, "DIR",
           "start the ranks in this folder"),
    Option("config", ("--config",), RUN, "program.config", read_path, "FILE",
           "read [launch] and [runtime] from a TOML file", in_file=False),
    Option("dry_run", ("--dry-run",), RUN, "program.dry_run", read_switch, "",
           "show what would be done, and do nothing", default=False),
    Option("workers", ("-n", "-np", "--nproc-per-node", "--workers"), WORKERS, "ranks.workers",
           read_workers, "N|MIN:MAX", "auto: cores; MIN:MAX: elastic, --spares N", 1,
           spelling="-n, --workers N|MIN:MAX"),
    Option("spares", ("--spares",), ASIDE, "ranks.spares", read_number, "N",
           "elastic: more workers, which wait until one is lost", 0),
    Option("servers", ("--servers",), WORKERS, "ranks.servers", read_number, "N",
           "hold variables; --server-replicas 1 copies them", 0),
    Option("server_replicas", ("--server-replicas",), ASIDE, "ranks.server_replicas",
           read_number, "K", "copies of each on other servers", 0),
    Option("fake_hosts", ("--fake-hosts",), ASIDE, "ranks.fake_hosts", read_count, "K",
           "act as K hosts joined by TCP, for tests", 1),
    Option("hostfile", ("--hostfile",), HOSTS, "hosts.hostfile", read_path, "FILE",
           "hosts and slots, one a line"),
    Option("host_discovery", ("--host-discovery",), HOSTS, "hosts.discovery", read_path, "SCRIPT",
           "elastic: prints hosts that exist now, one a line"),
    Option("hosts", ("-H", "--hosts"), HOSTS, "hosts.entries", read_text, "LIST",
           "hosts and slots: a:2,b:2"),
    Option("allocation", ("--allocation",), HOSTS, "hosts.allocation", read_text, "HOW",
           "hosts of the Slurm, PBS or LSF job", "auto", ("auto", "off")),
    Option("include", ("--include",), HOSTS, "hosts.include", read_text, "LIST",
           "use only these hosts"),
    Option("exclude", ("--exclude",), HOSTS, "hosts.exclude", read_text, "LIST",
           "do not use these hosts"),
    Option("map_by", ("--map-by",), HOSTS, "hosts.map_by", read_text, "HOW",
           "fill each, or one for each in turn", "slot", MAP_BY),
    Option("ssh", ("--ssh",), HOSTS, "hosts.ssh", read_text, "CMD",
           "the command for logins", "ssh"),
    Option("ssh_port", ("--ssh-port",), HOSTS, "hosts.ssh_port", read_port, "PORT",
           "port of ssh, where the file names none"),
    Option("ssh_always", ("--ssh-always",), HOSTS, "hosts.ssh_always", read_switch, "",
           "log in to this machine, too", default=False),
    Option("remote_python", ("--remote-python",), HOSTS, "hosts.remote_python", read_text,
           "PATH", "the interpreter on the hosts"),
    Option("encryption", ("--encryption",), HOSTS, "runtime.encryption", read_text, "HOW",
           "encryption of links", choices=_ENCRYPTION),
    Option("insecure", ("--insecure",), HOSTS, "runtime.insecure", read_switch, "",
           "allow --encryption off, on isolated networks"),
    Option("iface", ("--iface",), HOSTS, "hosts.iface", read_text, "LIST",
           "links through eth0, ^docker0 or 10.0.0.0/8"),
    Option("stage", ("--stage",), HOSTS, "hosts.stage", read_switch, "",
           "copy the script's folder to the hosts first", default=False),
    Option("listen", ("--listen",), HOSTS, "join.listen", read_address, "ADDR[:PORT]",
           "wait for --hosts N that join, without ssh"),
    Option("join", ("--join",), HOSTS, "join.address", read_address, "HOST:PORT",
           "join a job that listens, with this host", in_file=False),
    Option("key_file", ("--key-file",), HOSTS, "join.key_file", read_path, "FILE",
           "the key to join [~/.syncvar-key]"),
    Option("slots", ("--slots",), HOSTS, "join.slots", read_count, "K",
           "with --join: most workers here [cores]"),
    Option("start_method", ("--start-method",), WORKERS, "ranks.start_method", read_text,
           "HOW", "fresh, or forked from one", "auto", START_METHODS),
    Option("bind", ("--bind",), WORKERS, "ranks.bind", read_text, "MODE",
           "own cores for each worker", "auto", BIND_MODES),
    Option("cores_per_worker", ("--cores-per-worker",), WORKERS, "ranks.cores_per_worker",
           read_count, "K", "cores and BLAS threads of each worker"),
    Option("torch_env", ("--torch-env",), WORKERS, "ranks.torch_env", read_switch, "",
           "also set MASTER_ADDR and MASTER_PORT", default=False),
    Option("debug", ("--debug",), WORKERS, "ranks.debug", read_number, "RANK",
           "this rank gets the terminal; no deadlines"),
    Option("output", ("--output",), OUTPUT, "output.selection", read_output, "WHICH",
           f"show {', '.join(OUTPUT_MODES)}, or ranks 0,3-5", "all"),
    Option("log_dir", ("--log-dir",), OUTPUT, "output.log_dir", read_path, "DIR",
           "write one file for each rank and stream"),
    Option("events", ("--events",), OUTPUT, "output.events", read_path, "FILE",
           "append what happens to the job as JSON lines"),
    Option("stats", ("--stats",), OUTPUT, "output.stats", read_stats, "yes|FILE",
           "totals of all calls at the end, as a table or JSON", spelling="--stats[=FILE]"),
    Option("dashboard", ("--dashboard",), OUTPUT, "output.dashboard", read_dashboard, "ADDR[:PORT]",
           "a page that shows the job, and metrics", spelling="--dashboard[=ADDR[:PORT]]"),
    Option("ledger", ("--ledger",), OUTPUT, "runtime.ledger", read_path, "DIR",
           "calls by variable and program line, a file a rank"),
    Option("timestamps", ("--timestamps",), OUTPUT, "output.timestamps", read_switch, "",
           "put the local time before each line", default=False),
    Option("color", ("--color",), OUTPUT, "output.color", read_text, "WHEN",
           "colour the prefixes", "auto", _COLOR),
    Option("verbose", ("-v", "--verbose"), OUTPUT, "output.verbose", read_switch, "",
           "show more of what the launcher does", default=False),
    Option("timeout", ("--timeout",), LIMITS, "limits.timeout_s", read_limit, "S",
           "end the whole job after S seconds", math.inf),
    Option("forward_signals", ("--forward-signals",), LIMITS, "limits.forward_signals",
           read_signals, "LIST", "pass these signals to ranks", FORWARDED_SIGNALS),
    Option("max_restarts", ("--max-restarts",), LIMITS, "limits.max_restarts", read_number,
           "K", "start all (elastic: one) again when one fails", 0),
    Option("start_timeout", ("--start-timeout",), LIMITS, "runtime.rendezvous_timeout_s",
           read_seconds, "S", "longest wait for all ranks to meet"),
    Option("grace", ("--grace",), LIMITS, "runtime.term_grace_s", read_seconds, "S",
           "time between SIGTERM and SIGKILL"),
    Option("preempt_grace", ("--preempt-grace",), LIMITS, "runtime.preempt_grace_s",
           read_seconds, "S", "the same for ranks that save first"),
)  # fmt: skip

BY_FLAG = {flag: option for option in OPTIONS for flag in option.flags}
BY_OFF_FLAG = {option.off_flag: option for option in OPTIONS if option.is_switch}
OTHER_FLAGS = ("-m", "--no-python", "-h", "--help", "--help-hosts", "--version")
BY_VARIABLE = {LAUNCH_PREFIX + one.key.upper(): one for one in OPTIONS if not one.setting}
BY_KEY = {one.key: one for one in OPTIONS if one.in_file and not one.setting}
