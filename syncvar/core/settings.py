"""Every runtime setting: name, unit, default, range and meaning in one table.

A setting comes from, in this order: an option of the launcher, the variable `SYNCVAR_<NAME>`, the
table `[runtime]` of a TOML file, its default. The launcher passes the values to the workers in
environment variables. Docs, help and config files are generated from this table.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Self, dataclass_transform

from syncvar.core.environment import PREFIX, RankEnvironment
from syncvar.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_INTERNAL = frozenset(
    PREFIX + name
    for name in (
        *("KEY", "KEY_FD", "KEY_FILE", "STATUS_FD", "PASS_FDS", "PARENT_FD", "OUTCOME_FILE"),
        *(
            "RESULT_DIR",
            "CALL_FD",
            "PROCESS",
            "FORK_FD",
            "FULL_TRACEBACK",
            "RENDEZVOUS_DIR",
            "UPDATE_LEDGER",
        ),
    )
)

_BETWEEN_HOSTS = {
    "required": "encrypted tcp",
    "control-only": "unencrypted tcp with encrypted control",
    "off": "unencrypted tcp",
}
_FIRST_RETRY_S = 0.4  # pause before TCP's first retransmission: 0.2 s, and one round trip
_OPENED = (
    "anyone who reaches the ports of this job can read and change what its hosts send, and end it"
)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" for the known name closest to `name`, or an empty text."""
    import difflib  # only a wrong name needs it

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""


class Setting:
    """One setting.

    Args:
        default: Value if nothing sets it.
        unit: "s", "B" or another unit; empty for a choice.
        text: Meaning, for docs and help.
        low: Least value of a number.
        choices: Allowed texts; empty for any.
        is_shared: Whether all ranks must have the same value, because results depend on it.
    """

    __slots__ = ("choices", "default", "is_shared", "low", "name", "text", "unit")

    def __init__(
        self,
        default: Any,
        unit: str,
        text: str,
        low: float,
        choices: tuple[str, ...],
        *,
        is_shared: bool = False,
    ) -> None:
        self.name = ""
        self.default = default
        self.unit = unit
        self.text = text
        self.low = low
        self.choices = choices
        self.is_shared = is_shared

    def __set_name__(self, _owner: type, name: str) -> None:
        self.name = name

    def check(self, value: Any) -> None:
        """Raise ConfigError if the setting cannot have this value."""
        if self.choices:
            if value not in self.choices:
                raise ConfigError(
                    f"{self.name} must be one of {', '.join(self.choices)}, not {value!r}"
                )
        elif isinstance(self.default, str):
            if not isinstance(value, str):
                raise ConfigError(f"{self.name} must be a text, not {value!r}")
        elif isinstance(self.default, int) and isinstance(value, float):
            raise ConfigError(f"{self.name} must be a whole number of {self.unit}, not {value!r}")
        elif (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or math.isnan(value)
            or value < self.low
        ):
            least = f"{self.low:g}" if isinstance(self.low, float) else str(self.low)
            raise ConfigError(
                f"{self.name} must be a number of at least {least} {self.unit}, not {value!r}"
            )


def _setting(
    unit: str,
    text: str,
    low: float = 0.0,
    choices: tuple[str, ...] = (),
    *,
    default: Any,
    is_shared: bool = False,
) -> Any:
    return Setting(default, unit, text, low, choices, is_shared=is_shared)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(_setting,))
class _Settings:
    """Base like a frozen dataclass; dataclasses take several times as long to import."""

    def __init__(self, **values: Any) -> None:
        settings = type(self).runtime_settings()
        if unknown := values.keys() - {setting.name for setting in settings}:
            raise TypeError(f"there is no setting {', '.join(sorted(unknown))}")
        for setting in settings:
            value = values.get(setting.name, setting.default)
            setting.check(value)
            self.__dict__[setting.name] = value

    @classmethod
    def runtime_settings(cls) -> tuple[Setting, ...]:
        """Return every setting, in order."""
        return tuple(item for item in vars(cls).values() if isinstance(item, Setting))

    def replaced(self, **values: Any) -> Self:
        """Return a copy with other values."""
        return type(self)(**{**self.__dict__, **values})

    def __setattr__(self, name: str, _value: object) -> None:
        raise AttributeError(f"{name} cannot be set: settings are constant while a job runs")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items())
        return f"{type(self).__name__}({values})"


class RuntimeConfig(_Settings):
    """All settings of the runtime, each with a default.

    Example:
        >>> RuntimeConfig.from_mapping({"SYNCVAR_LOST_AFTER_S": "1.5"}).lost_after_s
        1.5
    """

    rendezvous_timeout_s: float = _setting("s", "longest wait for all ranks to meet", default=300.0)
    handshake_timeout_s: float = _setting(
        "s",
        "longest wait for a link to open; at least lost_after_s once the rank has joined",
        default=10.0,
    )
    missing_report_s: float = _setting(
        "s", "interval of messages that name missing ranks while others wait", 0.05, default=5.0
    )
    heartbeat_interval_s: float = _setting(
        "s", "time between heartbeats on a link", 0.01, default=1.0
    )
    suspect_after_s: float = _setting("s", "silence after which a rank is suspected", default=5.0)
    lost_after_s: float = _setting(
        "s",
        "silence after which a rank has failed, also if it does not answer a new link",
        default=15.0,
    )
    stall_warning_s: float = _setting(
        "s",
        "wait after which a warning names the waiting and the late ranks; "
        "repeated after 6 times and 30 times this wait",
        default=10.0,
    )
    observe_interval_s: float = _setting(
        "s",
        "interval at which the launcher asks the ranks for their last calls, to name a rank that "
        "others wait for and to compare clocks; 0 asks only for syncvar status, top and the like",
        0,
        default=5.0,
    )
    host_discovery_s: float = _setting(
        "s", "interval at which the launcher asks the script of --host-discovery", 0.05, default=5.0
    )
    host_exclusion_s: float = _setting(
        "s",
        "time for which an elastic job does not use a host that has failed; each further failure "
        "doubles it, up to ten minutes",
        0,
        default=10.0,
    )
    report_after_s: float = _setting(
        "s", "wait after which a rank reports its call to the deadlock detector", 0.01, default=0.1
    )
    collective_timeout_s: float = _setting(
        "s", "longest wait of a call without timeout=", default=1800.0
    )
    abort_grace_s: float = _setting(
        "s", "time for the other ranks to end by themselves after a failure", default=2.0
    )
    term_grace_s: float = _setting("s", "time between SIGTERM and SIGKILL", default=10.0)
    preempt_grace_s: float = _setting(
        "s", "time to save and end for ranks that handle SIGTERM as a notice", default=20.0
    )
    restart_delay_s: float = _setting(
        "s", "pause before the first restart; it doubles with each restart, up to 30 s", default=1.0
    )
    shutdown_timeout_s: float = _setting(
        "s", "longest wait for the other ranks in sv.shutdown()", default=2.0
    )
    window_bytes: int = _setting(
        "B", "unconsumed bytes allowed on a link for each group", 4096, default=64 << 20
    )
    segment_bytes: int = _setting(
        "B",
        "largest payload of a frame; an unauthenticated peer can make a rank allocate that much",
        1024,
        default=1 << 20,
    )
    shm_bytes: int = _setting(
        "B", "virtual size of the shared memory of a host", 16 << 20, default=1 << 40
    )
    algorithm: str = _setting(
        "list",
        "algorithms for the whole job, such as all_reduce:ring,broadcast:tree",
        default="",
        is_shared=True,
    )
    algorithm_choice: str = _setting(
        "",
        "choice of algorithms between hosts: from a short measurement when the ranks meet, with "
        "the bits of sums as by the rules (same-bits) or with other bits (measured); or by the "
        "rules alone",
        choices=("same-bits", "measured", "rules"),
        default="same-bits",
        is_shared=True,
    )
    eager_bytes: int = _setting(
        "B", "longest message of send that returns before the receiver takes it", 0, default=65536
    )
    log_level: str = _setting(
        "",
        "least severe messages that workers log on standard error",
        choices=("warning", "info", "debug"),
        default="warning",
    )
    progress: str = _setting(
        "",
        "lines that show how far long work of syncvar is, such as checkpoints: on the standard "
        "error of rank 0 if that is a terminal, or the launcher's is one (auto), or never",
        choices=("auto", "on", "off"),
        default="auto",
    )
    trace: str = _setting(
        "path",
        "folder for the flight record of every rank, written at the end of every run",
        default="",
    )
    ledger: str = _setting(
        "path",
        "folder for the ledger of every rank: calls, bytes and time by variable and program line",
        default="",
    )
    transport: str = _setting(
        "",
        "data path: shared memory on a host, and lanes or ZeroMQ (auto); ZeroMQ only (zmq); "
        "under mpirun, MPI in place of ZeroMQ (mpi), or MPI only (mpi-only)",
        choices=("auto", "zmq", "mpi", "mpi-only"),
        default="auto",
    )
    encryption: str = _setting(
        "",
        "encrypted links between hosts: all, those of the launcher only, or none "
        "(which needs insecure)",
        choices=("required", "control-only", "off"),
        default="required",
        is_shared=True,
    )
    insecure: str = _setting(
        "",
        "allow encryption off, for networks that nobody else reaches",
        choices=("off", "on"),
        default="off",
    )
    single_copy: str = _setting(
        "",
        "read arrays directly from the memory of another worker, if the system allows it",
        choices=("auto", "off"),
        default="auto",
    )
    call_runner: str = _setting(
        "",
        "runner of persistent calls: the C extension if there is one (auto), or Python",
        choices=("auto", "c", "python"),
        default="auto",
    )
    check_shm: str = _setting(
        "",
        "check every access to shared memory against its allocations, to find bugs in syncvar",
        choices=("off", "on"),
        default="off",
    )
    check_every: int = _setting(
        "runs",
        "compare replicas every N runs (outside strategy.run: every N writes of the most-written "
        "variable); 1 MiB of variables, or one larger one, at a time; 0 for never",
        0,
        default=100,
        is_shared=True,
    )
    check_finite: str = _setting(
        "",
        "reaction to NaN and infinity in the input of a reduction or the write of a variable",
        choices=("off", "warn", "raise"),
        default="off",
        is_shared=True,
    )
    auto_log: str = _setting(
        "path", "file to which AUTO appends its decisions, as JSON lines", default=""
    )
    auto_replay: str = _setting(
        "path", "file of decisions that AUTO follows instead of deciding", default=""
    )
    match_log: str = _setting(
        "path",
        "folder to which each rank writes the messages that its probes and receives from any "
        "source find",
        default="",
    )
    match_replay: str = _setting(
        "path", "such a folder, whose messages are found again instead of others", default=""
    )

    def consistent(self) -> RuntimeConfig:
        """Return these settings, or raise ConfigError if two of them contradict each other.

        Single values are checked before. Layers (file, variables, command line) are read one by
        one, so this check runs when all are known.
        """
        for name in ("suspect_after_s", "lost_after_s"):
            if self.heartbeat_interval_s > getattr(self, name):
                raise ConfigError(
                    f"heartbeat_interval_s ({self.heartbeat_interval_s:g}) must not exceed {name} "
                    f"({getattr(self, name):g}): a silence shorter than a heartbeat interval means "
                    f"nothing"
                )
        if self.encryption == "off" and self.insecure == "off":
            raise ConfigError(
                f"encryption off needs insecure on (--insecure, or SYNCVAR_INSECURE=on for ranks "
                f"that another launcher starts): {_OPENED}. With encryption control-only nobody "
                f"else can join the job"
            )
        # A user who only lowers lost_after_s need not lower the default of suspect_after_s too.
        is_chosen = self.suspect_after_s not in (math.inf, type(self)().suspect_after_s)
        if is_chosen and self.suspect_after_s > self.lost_after_s:
            raise ConfigError(
                f"suspect_after_s ({self.suspect_after_s:g}) must not exceed lost_after_s "
                f"({self.lost_after_s:g})"
            )
        return self

    @property
    def link_silence_s(self) -> float:
        """Longest silence of a connection between hosts, in seconds.

        A host that was cut off for half of `lost_after_s` must be back in time. TCP doubles the
        pauses between its retries: it recovers at most as long after the cut as the cut lasted,
        plus its first pause.
        """
        return self.lost_after_s + _FIRST_RETRY_S

    @property
    def link_opening_s(self) -> float:
        """Longest time in which a link between joined processes may open, in seconds.

        A stopped process does not answer a new link. It fails no sooner by that than by silence.
        """
        return max(self.handshake_timeout_s, self.link_silence_s)

    @property
    def host_silence_s(self) -> float:
        """Longest silence between the launcher and another host's agent, in seconds."""
        return self.link_silence_s + self.heartbeat_interval_s

    @property
    def shares_memory(self) -> bool:
        """Whether the processes of a host use shared memory, if they can."""
        return self.transport in ("auto", "mpi")

    @property
    def uses_mpi(self) -> bool:
        """Whether data that does not go through shared memory goes through MPI."""
        return self.transport in ("mpi", "mpi-only")

    @property
    def between_hosts(self) -> str:
        """The links between hosts, as text."""
        if self.uses_mpi:
            return "MPI (not encrypted by syncvar)"
        return _BETWEEN_HOSTS[self.encryption]

    @property
    def exposure_warning(self) -> str:
        """Warning about access that these settings give to others; empty if none."""
        return f"encryption is off: {_OPENED}" if self.encryption == "off" else ""

    def shared(self) -> dict[str, int | str]:
        """Return the settings that must be equal on all ranks, because results depend on them."""
        return {
            item.name: getattr(self, item.name)
            for item in self.runtime_settings()
            if item.is_shared
        }

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the name of every setting."""
        return tuple(item.name for item in cls.runtime_settings())

    @classmethod
    def from_mapping(
        cls, environ: Mapping[str, str], base: Mapping[str, Any] | None = None
    ) -> RuntimeConfig:
        """Return the settings of an environment over `base`, or raise ConfigError."""
        values: dict[str, Any] = dict(base or {})
        for name in values:
            if name not in cls.names():
                raise ConfigError(f"unknown setting {name!r}{nearest(name, cls.names())}")
        for item in cls.runtime_settings():
            text = environ.get(PREFIX + item.name.upper())
            if text is not None:
                values[item.name] = _parse(item.name, text, type(item.default))
        return cls(**values)

    def to_mapping(self) -> dict[str, str]:
        """Return the environment variables that pass all settings but defaults to a worker."""
        return {
            PREFIX + item.name.upper(): str(getattr(self, item.name))
            for item in self.runtime_settings()
            if getattr(self, item.name) != item.default
        }


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        number = "an integer" if kind is int else "a number"
        raise ConfigError(f"{PREFIX}{name.upper()}={text!r} is not {number}") from None


def doubtful_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each unknown `SYNCVAR_` variable whose name is close to a setting's.

    Other variables with the prefix may be the program's own.
    """
    settings = [PREFIX + name.upper() for name in RuntimeConfig.names()]
    contract = RankEnvironment(0, 1, 0, 1, 0, 1, 0, "", "").to_mapping()
    known = {*settings, *contract, *_INTERNAL}
    # The common prefix is left out, because it would make any two names similar.
    candidates = [one.removeprefix(PREFIX) for one in (*settings, *_INTERNAL)]
    sentences = []
    for name in environ:
        if not name.startswith(PREFIX) or name.startswith(PREFIX + "LAUNCH_") or name in known:
            continue
        if close := nearest(name.removeprefix(PREFIX), candidates):
            hint = close.replace("mean ", "mean " + PREFIX)
            sentences.append(f"{name} is no setting{hint}")
    return sentences


def log_at(level: str) -> None:
    """Write the log to standard error, unless the program configures it or `level` is "warning"."""
    import logging  # the launcher does not need it

    log = logging.getLogger("syncvar")
    if level != "warning":
        log.setLevel(level.upper())
        if not log.hasHandlers():
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("syncvar %(levelname)s: %(message)s"))
            log.addHandler(handler)
