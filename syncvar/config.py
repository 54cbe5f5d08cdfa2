"""Every knob of the runtime: name, unit, default, range and meaning in one table.

A knob is set by a command line option of the launcher, by the variable `SYNCVAR_<NAME>`, by the `[runtime]` table of
a TOML file, or by its default, in this order. The launcher hands its result to the workers as variables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from syncvar.env import PREFIX
from syncvar.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

__all__ = ["RuntimeConfig", "nearest"]


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " (did you mean …?)" for the known name closest to `name`, or an empty text.

    Example:
        >>> nearest("worker", ["workers", "timeout"])
        ' (did you mean workers?)'
    """
    import difflib  # only a wrong name needs it

    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]}?)" if close else ""


def _knob(default: Any, unit: str, text: str, low: float = 0.0, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"unit": unit, "text": text, "low": low, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """The knobs, all with defaults.

    Example:
        >>> RuntimeConfig.from_mapping({"SYNCVAR_LOST_AFTER_S": "1.5"}).lost_after_s
        1.5
    """

    rendezvous_timeout_s: float = _knob(300.0, "s", "longest wait for all ranks to meet")
    handshake_timeout_s: float = _knob(10.0, "s", "longest wait for a link to open")
    roll_call_s: float = _knob(5.0, "s", "how often the ranks still missing are named while others wait", 0.05)
    heartbeat_interval_s: float = _knob(1.0, "s", "time between signs of life on a link", 0.01)
    suspect_after_s: float = _knob(5.0, "s", "silence after which a rank is suspected")
    lost_after_s: float = _knob(15.0, "s", "silence after which a rank is lost")
    stall_warning_s: float = _knob(10.0, "s", "wait after which one sentence says who waits for whom")
    report_after_s: float = _knob(0.1, "s", "wait after which a rank reports its call to the arbiter", 0.01)
    collective_timeout_s: float = _knob(1800.0, "s", "longest wait of a call that is given no timeout")
    abort_grace_s: float = _knob(2.0, "s", "time for survivors to end by themselves after a failure")
    term_grace_s: float = _knob(10.0, "s", "time between SIGTERM and SIGKILL")
    preempt_grace_s: float = _knob(20.0, "s", "time that ranks which take SIGTERM as a notice get to save and end")
    restart_delay_s: float = _knob(1.0, "s", "pause before the first restart; each further one waits twice as long, up to 30 s")
    shutdown_timeout_s: float = _knob(2.0, "s", "longest wait for the peers' goodbye at the end")
    window_bytes: int = _knob(64 << 20, "B", "unconsumed bytes allowed on a link for each group", 4096)
    segment_bytes: int = _knob(1 << 20, "B", "largest payload of one frame", 1024)
    arena_bytes: int = _knob(1 << 40, "B", "virtual size of the memory that the processes of one host share", 16 << 20)
    algorithm: str = _knob("", "list", "algorithms demanded for the whole job, such as all_reduce:ring,broadcast:tree")
    eager_bytes: int = _knob(65536, "B", "longest message of send that does not wait for its receiver", 0)
    log_level: str = _knob("warning", "", "what workers log on standard error", choices=("warning", "info", "debug"))
    trace: str = _knob("", "path", "folder for the flight record of every rank, written at the end of every run")
    transport: str = _knob("auto", "", "data path between processes of one host", choices=("auto", "zmq"))
    single_copy: str = _knob(
        "auto", "", "read arrays where they lie in another worker's memory, where the system allows it", choices=("auto", "off")
    )
    check_every: int = _knob(100, "runs", "how often copies of variables that are kept equal are compared; 0 for never", 0)
    auto_log: str = _knob("", "path", "file to which AUTO's decisions are added, as JSON lines")
    auto_replay: str = _knob("", "path", "file of such decisions, which AUTO follows instead of deciding")

    def __post_init__(self) -> None:
        for item in fields(self):
            value, low, choices = getattr(self, item.name), item.metadata["low"], item.metadata["choices"]
            if isinstance(item.default, str) and not choices:
                if not isinstance(value, str):
                    raise ConfigError(f"{item.name} must be a text, not {value!r}")
            elif choices:
                if value not in choices:
                    raise ConfigError(f"{item.name} must be one of {', '.join(choices)}, not {value!r}")
            elif isinstance(item.default, str):
                if not isinstance(value, str):
                    raise ConfigError(f"{item.name} must be a text, not {value!r}")
            elif isinstance(item.default, int) and isinstance(value, float):
                raise ConfigError(f"{item.name} must be a whole number of {item.metadata['unit']}, not {value!r}")
            elif isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or value < low:
                least = f"{low:g}" if isinstance(low, float) else str(low)
                raise ConfigError(f"{item.name} must be a number of at least {least} {item.metadata['unit']}, not {value!r}")

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
        # Who only lowers lost_after_s has not asked for suspicion after that.
        said = self.suspect_after_s not in (math.inf, type(self)().suspect_after_s)
        if said and self.suspect_after_s > self.lost_after_s:
            raise ConfigError(
                f"suspect_after_s ({self.suspect_after_s:g}) must not exceed lost_after_s ({self.lost_after_s:g})"
            )
        return self

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Return the name of every knob."""
        return tuple(item.name for item in fields(cls))

    @classmethod
    def from_mapping(cls, environ: Mapping[str, str], base: Mapping[str, Any] | None = None) -> RuntimeConfig:
        """Build the settings from an environment laid over `base` (already parsed values, for instance of a file).

        Raises:
            ConfigError: A value cannot be read or is out of range; the message names it.
        """
        values: dict[str, Any] = dict(base or {})
        for name in values:
            if name not in cls.names():
                raise ConfigError(f"unknown setting {name!r}{nearest(name, cls.names())}")
        for item in fields(cls):
            text = environ.get(PREFIX + item.name.upper())
            if text is not None:
                values[item.name] = _parse(item.name, text, type(item.default))
        return cls(**values)

    def to_mapping(self) -> dict[str, str]:
        """Return the variables that hand the settings which are not defaults to a worker."""
        return {
            PREFIX + item.name.upper(): str(getattr(self, item.name))
            for item in fields(self)
            if getattr(self, item.name) != item.default
        }


def _parse(name: str, text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{PREFIX}{name.upper()}={text!r} is not {'an integer' if kind is int else 'a number'}") from None
