"""Every knob of the runtime: name, unit, default, range and meaning in one table.

A knob is set by a command line option of the launcher, by the variable `SYNCVAR_<NAME>`, by the `[runtime]` table of
a TOML file, or by its default, in this order. The launcher hands its result to the workers as variables.
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
        "KEY",
        "KEY_FD",
        "KEY_FILE",
        "STATUS_FD",
        "PASS_FDS",
        "PARENT_FD",
        "OUTCOME_FILE",
        "RESULT_DIR",
        "CALL_FD",
        "PROCESS",
        "FORK_FD",
        "FULL_TRACEBACK",
        "MEETING_DIR",
    )
)

_BETWEEN_HOSTS = {
    "required": "encrypted tcp",
    "control-only": "unencrypted tcp with encrypted control",
    "off": "unencrypted tcp",
}
_FIRST_PAUSE_S = 0.4  # of TCP: 0.2 s and the time of a round
_OPENED = (
    "whoever reaches the ports of this job can read and change what its hosts send, and end it"
)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" for the known name closest to `name`, or an empty text.

    Example:
        >>> nearest("worker", ["workers", "timeout"])
        ' (did you mean workers?)'
    """
    import difflib  # only a wrong name needs it

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.75)
    return f" (did you mean {close[0]}?)" if close else ""


class Setting:
    """One knob.

    Args:
        default: Its value where nothing else is said.
        unit: "s", "B", or what else it counts or names; empty for a choice.
        text: What it is, in words.
        low: The least value of a number.
        choices: The texts that it may be; empty for any.
        is_shared: All ranks must have it alike, for results depend on it.

    Attributes:
        name: As the settings have it.
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
        """Refuse a value that it cannot have, with a ConfigError that names it."""
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


def _knob(
    unit: str,
    text: str,
    low: float = 0.0,
    choices: tuple[str, ...] = (),
    *,
    default: Any,
    is_shared: bool = False,
) -> Any:
    return Setting(default, unit, text, low, choices, is_shared=is_shared)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(_knob,))
class _Settings:
    """What a frozen dataclass would be, which costs several times as much to load: every start of a job waits for it."""

    def __init__(self, **values: Any) -> None:
        knobs = type(self).knobs()
        if unknown := values.keys() - {knob.name for knob in knobs}:
            raise TypeError(f"there is no setting {', '.join(sorted(unknown))}")
        for knob in knobs:
            value = values.get(knob.name, knob.default)
            knob.check(value)
            self.__dict__[knob.name] = value

    @classmethod
    def knobs(cls) -> tuple[Setting, ...]:
        """Return every knob, in order."""
        return tuple(knob for knob in vars(cls).values() if isinstance(knob, Setting))

    def replaced(self, **values: Any) -> Self:
        """Return these settings with some values instead of theirs."""
        return type(self)(**{**self.__dict__, **values})

    def __setattr__(self, name: str, _value: object) -> None:
        raise AttributeError(f"{name} cannot be set: settings do not change")

    def __eq__(self, other: object) -> bool:
        return self.__dict__ == other.__dict__ if isinstance(other, type(self)) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.__dict__.items())})"


class RuntimeConfig(_Settings):
    """The knobs, all with defaults.

    Example:
        >>> RuntimeConfig.from_mapping({"SYNCVAR_LOST_AFTER_S": "1.5"}).lost_after_s
        1.5
    """

    rendezvous_timeout_s: float = _knob("s", "longest wait for all ranks to meet", default=300.0)
    handshake_timeout_s: float = _knob(
        "s",
        "longest wait for a link to open; a rank that has joined has lost_after_s at least",
        default=10.0,
    )
    missing_report_s: float = _knob(
        "s", "how often the ranks still missing are named while others wait", 0.05, default=5.0
    )
    heartbeat_interval_s: float = _knob(
        "s", "time between signs of life on a link", 0.01, default=1.0
    )
    suspect_after_s: float = _knob("s", "silence after which a rank is suspected", default=5.0)
    lost_after_s: float = _knob(
        "s",
        "silence after which a rank is lost, also one that does not answer a new link",
        default=15.0,
    )
    stall_warning_s: float = _knob(
        "s",
        "wait after which one sentence says who waits for whom, and what those do; again after 6 and 30 times as long",
        default=10.0,
    )
    report_after_s: float = _knob(
        "s", "wait after which a rank reports its call to the arbiter", 0.01, default=0.1
    )
    collective_timeout_s: float = _knob(
        "s", "longest wait of a call that is given no timeout", default=1800.0
    )
    abort_grace_s: float = _knob(
        "s", "time for survivors to end by themselves after a failure", default=2.0
    )
    term_grace_s: float = _knob("s", "time between SIGTERM and SIGKILL", default=10.0)
    preempt_grace_s: float = _knob(
        "s", "time that ranks which take SIGTERM as a notice get to save and end", default=20.0
    )
    restart_delay_s: float = _knob(
        "s",
        "pause before the first restart; each further one waits twice as long, up to 30 s",
        default=1.0,
    )
    shutdown_timeout_s: float = _knob(
        "s", "longest wait for the peers' goodbye at the end", default=2.0
    )
    window_bytes: int = _knob(
        "B", "unconsumed bytes allowed on a link for each group", 4096, default=64 << 20
    )
    segment_bytes: int = _knob(
        "B",
        "largest payload of one frame, which is also what a stranger at a port can make a rank hold",
        1024,
        default=1 << 20,
    )
    shm_bytes: int = _knob(
        "B",
        "virtual size of the memory that the processes of one host share",
        16 << 20,
        default=1 << 40,
    )
    algorithm: str = _knob(
        "list",
        "algorithms demanded for the whole job, such as all_reduce:ring,broadcast:tree",
        default="",
        is_shared=True,
    )
    eager_bytes: int = _knob(
        "B", "longest message of send that does not wait for its receiver", 0, default=65536
    )
    log_level: str = _knob(
        "",
        "what workers log on standard error",
        choices=("warning", "info", "debug"),
        default="warning",
    )
    trace: str = _knob(
        "path",
        "folder for the flight record of every rank, written at the end of every run",
        default="",
    )
    transport: str = _knob(
        "",
        "data path: memory that the processes of a host share, and ZeroMQ (auto); ZeroMQ alone (zmq); or, under mpirun, MPI in place "
        "of ZeroMQ (mpi), or MPI alone (mpi-only)",
        choices=("auto", "zmq", "mpi", "mpi-only"),
        default="auto",
    )
    encryption: str = _knob(
        "",
        "links between hosts: all encrypted, those of the launcher only, or none (which needs insecure)",
        choices=("required", "control-only", "off"),
        default="required",
        is_shared=True,
    )
    insecure: str = _knob(
        "",
        "encryption may be off: for networks that nobody else reaches",
        choices=("off", "on"),
        default="off",
    )
    single_copy: str = _knob(
        "",
        "read arrays where they lie in another worker's memory, where the system allows it",
        choices=("auto", "off"),
        default="auto",
    )
    call_runner: str = _knob(
        "",
        "what runs persistent calls: the C extension where there is one, or Python",
        choices=("auto", "c", "python"),
        default="auto",
    )
    check_shm: str = _knob(
        "",
        "compare every use of shared memory with what has been given out, to find bugs of this library",
        choices=("off", "on"),
        default="off",
    )
    check_every: int = _knob(
        "runs",
        "every variable that is kept equal is compared once in so many runs (outside runs: steps, as the variable written most often "
        "counts them), a MiB of them, or one larger variable, at a time; 0 for never",
        0,
        default=100,
        is_shared=True,
    )
    check_finite: str = _knob(
        "",
        "what to do about NaN and infinity in what a rank brings to a reduction or writes to a variable",
        choices=("off", "warn", "raise"),
        default="off",
        is_shared=True,
    )
    auto_log: str = _knob(
        "path", "file to which AUTO's decisions are added, as JSON lines", default=""
    )
    auto_replay: str = _knob(
        "path", "file of such decisions, which AUTO follows instead of deciding", default=""
    )

    def consistent(self) -> RuntimeConfig:
        """Return these settings if they fit together; each alone has been checked already.

        Layers (file, variables, command line) are read one by one, so this is asked when all are there.

        Raises:
            ConfigError: Two of them contradict each other; both are named.

        Example:
            >>> RuntimeConfig(heartbeat_interval_s=0.1, suspect_after_s=0.5, lost_after_s=1.5).consistent().lost_after_s
            1.5
        """
        for name in ("suspect_after_s", "lost_after_s"):
            if self.heartbeat_interval_s > getattr(self, name):
                raise ConfigError(
                    f"heartbeat_interval_s ({self.heartbeat_interval_s:g}) must not exceed {name} "
                    f"({getattr(self, name):g}): a silence shorter than the time between signs of life means nothing"
                )
        if self.encryption == "off" and self.insecure == "off":
            raise ConfigError(
                f"encryption off needs insecure on (--insecure, or SYNCVAR_INSECURE=on for ranks that another launcher starts): {_OPENED}. "
                f"encryption control-only keeps strangers out"
            )
        # Who only lowers lost_after_s has not asked for suspicion after that.
        said = self.suspect_after_s not in (math.inf, type(self)().suspect_after_s)
        if said and self.suspect_after_s > self.lost_after_s:
            raise ConfigError(
                f"suspect_after_s ({self.suspect_after_s:g}) must not exceed lost_after_s ({self.lost_after_s:g})"
            )
        return self

    @property
    def link_silence_s(self) -> float:
        """How long a connection between hosts may be silent, in seconds.

        Who has been cut off for half of `lost_after_s` is to be back in time. TCP tries again after pauses that it doubles: at
        the latest after as long again as the cut has lasted, and its first pause.
        """
        return self.lost_after_s + _FIRST_PAUSE_S

    @property
    def link_opening_s(self) -> float:
        """How long a link between processes that have joined may take to open, in seconds.

        A process that is stopped answers no new link. It is lost no sooner by that than by its silence.
        """
        return max(self.handshake_timeout_s, self.link_silence_s)

    @property
    def host_silence_s(self) -> float:
        """How long the launcher and the agent of another host may not hear of each other, in seconds: from the last sign of life."""
        return self.link_silence_s + self.heartbeat_interval_s

    @property
    def shares_memory(self) -> bool:
        """Whether the processes of a host are to share memory, where they can."""
        return self.transport in ("auto", "mpi")

    @property
    def uses_mpi(self) -> bool:
        """Whether what does not go through shared memory goes through MPI."""
        return self.transport in ("mpi", "mpi-only")

    @property
    def between_hosts(self) -> str:
        """What goes between hosts, in words."""
        return (
            "MPI (not encrypted by syncvar)" if self.uses_mpi else _BETWEEN_HOSTS[self.encryption]
        )

    @property
    def opened(self) -> str:
        """What these settings open to others, in a sentence; empty where nothing."""
        return f"encryption is off: {_OPENED}" if self.encryption == "off" else ""

    def shared(self) -> dict[str, int | str]:
        """Return the settings that all ranks of a job must have alike, for results depend on them."""
        return {knob.name: getattr(self, knob.name) for knob in self.knobs() if knob.is_shared}

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the name of every knob."""
        return tuple(item.name for item in cls.knobs())

    @classmethod
    def from_mapping(
        cls, environ: Mapping[str, str], base: Mapping[str, Any] | None = None
    ) -> RuntimeConfig:
        """Build the settings from an environment laid over `base` (already parsed values, for instance of a file).

        Raises:
            ConfigError: A value cannot be read or is out of range; the message names it.
        """
        values: dict[str, Any] = dict(base or {})
        for name in values:
            if name not in cls.names():
                raise ConfigError(f"unknown setting {name!r}{nearest(name, cls.names())}")
        for item in cls.knobs():
            text = environ.get(PREFIX + item.name.upper())
            if text is not None:
                values[item.name] = _parse(item.name, text, type(item.default))
        return cls(**values)

    def to_mapping(self) -> dict[str, str]:
        """Return the variables that hand the settings which are not defaults to a worker."""
        return {
            PREFIX + item.name.upper(): str(getattr(self, item.name))
            for item in self.knobs()
            if getattr(self, item.name) != item.default
        }


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(
            f"{PREFIX}{name.upper()}={text!r} is not {'an integer' if kind is int else 'a number'}"
        ) from None


def doubtful_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that nobody reads and whose name is nearly that of a setting.

    Others that begin likewise may be the program's own.

    Example:
        >>> doubtful_variables({"SYNCVAR_COLECTIVE_TIMEOUT_S": "1", "SYNCVAR_MY_OWN": "x", "SYNCVAR_KEY_FD": "3"})
        ['SYNCVAR_COLECTIVE_TIMEOUT_S is no setting (did you mean SYNCVAR_COLLECTIVE_TIMEOUT_S?)']
    """
    settings = [PREFIX + name.upper() for name in RuntimeConfig.names()]
    contract = RankEnvironment(0, 1, 0, 1, 0, 1, 0, "", "").to_mapping()
    known = {*settings, *contract, *_INTERNAL}
    said = []
    for name in environ:
        if (
            name.startswith(PREFIX)
            and not name.startswith(PREFIX + "LAUNCH_")
            and name not in known
        ):
            # Without what all of them begin with, which would make any two alike.
            close = nearest(
                name.removeprefix(PREFIX),
                [one.removeprefix(PREFIX) for one in (*settings, *_INTERNAL)],
            )
            said += (
                [f"{name} is no setting{close.replace('mean ', 'mean ' + PREFIX)}"] if close else []
            )
    return said
