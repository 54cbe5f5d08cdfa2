"""The text of a failure: what happened, the evidence, the other ranks, what to try.

One block shows one failure, for any number of ranks. It escapes all text of a rank, and masks
values of variables that look like secrets. These functions take values and return text.
"""

from __future__ import annotations

import re
import shlex
from typing import TYPE_CHECKING, NamedTuple

from syncvar.core.exit_status import describe_exit, signal_name
from syncvar.core.process_ids import (
    RANKS,
    WORKERS,
    ProcessNames,
    is_server,
    process_list,
    process_name,
)
from syncvar_launcher.io.output import escape

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_CTRL_C = 2
_EVIDENCE_LINES = 40
_HEAD_LINES = 6
_OTHER_LINES = 8
_WHOLE_LINES = 1000
_TRACEBACK = "Traceback (most recent call last):"
_FURTHER = 2  # tracebacks other than that of the first failure
_FURTHER_LINES = 12
_MESSAGES = 3
_COMMANDS = 2
_OF_TORCH = ("MASTER_ADDR", "MASTER_PORT")  # torch.distributed needs them: --torch-env
TIME_LIMIT = "SV-507"  # code of a job that its time limit has ended
LOST_FILES = "SV-508"  # code of a job that has succeeded, and of which files are missing
_SECRET = re.compile("KEY|TOKEN|SECRET|PASS|AUTH|COOKIE", re.IGNORECASE)


class FailureReport(NamedTuple):
    """The first failure of a job."""

    rank: int  # rank that failed, or -1 for the job as a whole
    status: int | None  # exit code, or minus the signal, or None before the process ends
    host: str = ""  # host; empty is not shown
    # what is known beyond the status, for instance "out of memory (kernel)"; may be empty
    reason: str = ""
    call: str = ""  # call in progress, for instance "all_reduce #12 at train.py:40"; may be empty
    elapsed_s: float | None = None  # time since the start of the job, or None
    traceback: str = ""  # traceback of the exception, or an empty text
    last_lines: Sequence[str] = ()  # last lines that the rank wrote, shown without a traceback
    stands_above: bool = False  # whether the launcher has just shown these lines
    code: str = ""  # code that `syncvar explain` describes, or an empty text
    program: str = ""  # program of the rank; empty if all ranks run the same one
    is_elastic: bool = False  # whether the job is elastic, so that --debug is impossible

    @property
    def names(self) -> ProcessNames:
        """What sentences call the processes of the job."""
        return WORKERS if self.is_elastic else RANKS


class WorkerTraceback(NamedTuple):
    """An exception that ended a rank, the first one of the job or another."""

    rank: int  # rank
    traceback: str  # traceback, or the rank's last text
    is_own: bool = True  # whether it does not follow from the failure of another rank


class SecondaryFailure(NamedTuple):
    """What another rank did when the first one failed."""

    rank: int  # rank
    activity: str  # text such as "waiting in all_reduce #12 at train.py:40"
    program: str = ""  # program of the rank; empty if all ranks run the same one


class EvidenceFiles(NamedTuple):
    """Where more of the evidence is."""

    log_dir: str = ""  # folder with the whole output of the ranks, or an empty text
    records: str = ""  # text that names the flight records, or an empty text


_NO_FILES = EvidenceFiles()


def failure_block(
    failure: FailureReport,
    others: Sequence[SecondaryFailure] = (),
    *,
    arguments: Sequence[str] = (),
    remedies: Sequence[Sequence[str]] = (),
    files: EvidenceFiles = _NO_FILES,
    raised: Sequence[WorkerTraceback] = (),
    is_whole: bool = False,
) -> str:
    """Write the block that ends a failed job.

    Args:
        failure: The first failure.
        others: What the other ranks did; equal texts share one line.
        arguments: The arguments of syncvar-launch, for commands to try; empty for no advice.
        remedies: Options with which the job would survive such a failure.
        files: Where more of the evidence is.
        raised: The exceptions of all ranks; ranks with one traceback share a block.
        is_whole: Whether tracebacks keep all lines.

    Example:
        >>> others = [SecondaryFailure(0, "computing"), SecondaryFailure(1, "computing")]
        >>> failure = FailureReport(rank=2, status=-9, host="b", code="SV-302")
        >>> print(failure_block(failure, others, arguments=["-n", "3", "a.py"]), end="")
        syncvar: rank 2 on b was killed by signal 9 (SIGKILL)
        evidence: rank 2 wrote nothing
        others:
          ranks 0, 1: computing
        try:
          syncvar-launch --debug 2 -n 3 a.py
          syncvar-launch --log-dir logs -n 3 a.py
        more: syncvar explain SV-302
    """
    alike, further = _split_first(raised, failure)
    lines = [f"syncvar: {failure_sentence(failure)}"]
    lines += _evidence(failure, alike, is_whole=is_whole)
    shown = {one.rank for one in alike}
    for group in further[:_FURTHER]:
        lines += _traceback(group, _limit(_FURTHER_LINES, is_whole=is_whole), failure.names)
        shown |= {one.rank for one in group}
    others = [other for other in others if other.rank not in shown]
    if others:
        lines += ["others:", *_others(others, failure.names)]
    if arguments:
        options = [*remedies, *_options_to_try(failure, arguments, has_logs=bool(files.log_dir))]
        masked = mask_arguments(arguments)
        commands = [shlex.join(["syncvar-launch", *option, *masked]) for option in options]
        if commands:
            lines += ["try:", *(f"  {escape(line)}" for line in commands[:_COMMANDS])]
    if files.log_dir:
        name = process_name(failure.rank).replace(" ", "-")
        rank = f"{name}.out and {name}.err" if failure.rank >= 0 else "one file per rank"
        lines.append(f"whole output: {escape(files.log_dir)} ({rank})")
    if files.records:
        lines.append(f"evidence: {escape(files.records)}")
    if failure.code:
        lines.append(f"more: syncvar explain {failure.code}")
    return "".join(f"{line}\n" for line in lines)


def failure_sentence(failure: FailureReport) -> str:
    """Return the first line of the block: what failed.

    Example:
        >>> failure_sentence(FailureReport(rank=2, status=-9, elapsed_s=1.25))
        'rank 2 was killed by signal 9 (SIGKILL) after 1.2 s'
    """
    text = "the job" if failure.rank < 0 else process_name(failure.rank, failure.names)
    if failure.program:
        text += f" ({escape(failure.program)})"
    if failure.rank >= 0 and failure.host:
        text += f" on {escape(failure.host)}"
    text += " failed" if failure.status is None else f" {describe_exit(failure.status)}"
    if failure.elapsed_s is not None:
        text += f" after {failure.elapsed_s:.1f} s"
    if failure.call:
        text += f" in {escape(failure.call)}"
    return text + (f": {escape(failure.reason)}" if failure.reason else "")


def interrupted_block(
    name: str,
    places: Sequence[SecondaryFailure],
    raised: Sequence[WorkerTraceback] = (),
    names: ProcessNames = RANKS,
    *,
    is_whole: bool = False,
) -> str:
    """Write the block after a signal: who ended the job, and what its ranks were doing.

    `raised` has the exceptions that no other text shows.

    Example:
        >>> places = [SecondaryFailure(0, "in user code, a.py:3")]
        >>> print(interrupted_block("SIGINT", places), end="")
        syncvar: interrupted by SIGINT; all ranks have ended
        where they were:
          rank 0: in user code, a.py:3
    """
    lines = [f"syncvar: interrupted by {name}; all {names.word}s have ended"]
    if places:
        lines += ["where they were:", *_others(places, names)]
    for group in _group_by_calls(raised):
        lines += _traceback(group, _limit(_EVIDENCE_LINES, is_whole=is_whole), names)
    return "".join(f"{line}\n" for line in lines)


def ending_sentence(number: int, grace_s: float, names: ProcessNames = RANKS) -> str:
    """Return that the launcher ends the ranks, how long it waits, and how to shorten it.

    Example:
        >>> ending_sentence(2, 10.0)
        'ending the ranks, up to 10 s; Ctrl-C again kills them'
        >>> ending_sentence(15, 0.5)
        'received SIGTERM: ending the ranks, up to 0.5 s; a second signal kills them'
    """
    if number == _CTRL_C:
        return f"ending the {names.word}s, up to {grace_s:g} s; Ctrl-C again kills them"
    ending = f"ending the {names.word}s, up to {grace_s:g} s; a second signal kills them"
    return f"received {signal_name(number)}: {ending}"


def spared_block(
    number: int,
    places: Sequence[SecondaryFailure],
    launcher: int,
    names: ProcessNames = RANKS,
) -> str:
    """Write which ranks did not get a signal because it would have ended them, and what they do.

    Example:
        >>> places = [SecondaryFailure(0, "computing"), SecondaryFailure(1, "computing")]
        >>> print(spared_block(10, places, 4711), end="")  # doctest: +ELLIPSIS
        syncvar: SIGUSR1 would end ranks 0, 1, which have no handler for it: ...
          ranks 0, 1: computing
        syncvar: `syncvar stacks 4711` shows where they are in the script
    """
    ranks = process_list((place.rank for place in places), names)
    have = "has" if len(places) == 1 else "have"
    they = "it does" if len(places) == 1 else "they do"
    name = signal_name(number) or number
    reason = f"{name} would end {ranks}, which {have} no handler for it"
    where = "it is" if len(places) == 1 else "they are"
    lines = [
        f"syncvar: {reason}: {they} not get it. What {they}:",
        *_others(places, names),
        f"syncvar: `syncvar stacks {launcher}` shows where {where} in the script",
    ]
    return "".join(f"{line}\n" for line in lines)


def mask_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return a copy to print, without the values of variables whose names look like secrets.

    Example:
        >>> mask_environment({"HOME": "/root", "AWS_SECRET_KEY": "abc"})
        {'HOME': '/root', 'AWS_SECRET_KEY': '***'}
    """
    return {name: "***" if _SECRET.search(name) else value for name, value in environ.items()}


def mask_arguments(arguments: Sequence[str]) -> list[str]:
    """Return a command line to print, without the values that `--env` gives to secrets.

    Example:
        >>> mask_arguments(["--env", "TOKEN=abc", "--env=HOME=/root", "-xKEY=1", "a.py"])
        ['--env', 'TOKEN=***', '--env=HOME=/root', '-xKEY=***', 'a.py']
    """
    result: list[str] = []
    for index, argument in enumerate(arguments):
        start = next((one for one in ("--env=", "-x=", "-x") if argument.startswith(one)), "")
        name, equals, _ = argument.removeprefix(start).partition("=")
        is_variable = start or (index > 0 and arguments[index - 1] in ("--env", "-x"))
        result.append(
            f"{start}{name}=***" if is_variable and equals and _SECRET.search(name) else argument
        )
    return result


def _evidence(
    failure: FailureReport, alike: Sequence[WorkerTraceback], *, is_whole: bool
) -> list[str]:
    if failure.traceback.strip():
        return _traceback(
            alike or [WorkerTraceback(failure.rank, failure.traceback)],
            _limit(_EVIDENCE_LINES, is_whole=is_whole),
            failure.names,
        )
    if failure.last_lines:
        lines = list(failure.last_lines[-_EVIDENCE_LINES:])
        title = "last line" if len(lines) == 1 else f"last {len(lines)} lines"
    elif failure.rank >= 0:
        return [f"evidence: {process_name(failure.rank, failure.names)} wrote nothing"]
    else:
        return []
    process = f" of {process_name(failure.rank, failure.names)}" if failure.rank >= 0 else ""
    if failure.stands_above:
        return [f"evidence: {title}{process}, above"]
    return [f"evidence: {title}{process}", *_indent_lines(lines)]


def _split_first(
    raised: Sequence[WorkerTraceback], failure: FailureReport
) -> tuple[list[WorkerTraceback], list[list[WorkerTraceback]]]:
    """Return the exceptions with the traceback of the first failure, and the others."""
    first = [WorkerTraceback(failure.rank, failure.traceback)] if failure.traceback.strip() else []
    groups = _group_by_calls([*first, *(one for one in raised if one.rank != failure.rank)])
    alike = groups.pop(0) if first else []
    return alike, [group for group in groups if group[0].is_own]


def _group_by_calls(raised: Sequence[WorkerTraceback]) -> list[list[WorkerTraceback]]:
    groups: dict[str, list[WorkerTraceback]] = {}
    for one in raised:
        if one.traceback.strip():
            groups.setdefault(_split(_without_own_name(one))[0], []).append(one)
    return list(groups.values())


def _without_own_name(one: WorkerTraceback) -> str:
    """Return a traceback without the rank's own name, so that ranks can be compared."""
    return re.sub(rf"\b{process_name(one.rank)}\b", "this rank", one.traceback)


def _split(traceback: str) -> tuple[str, str]:
    """Return the calls of a traceback, and the exception with its message."""
    # Not str.splitlines: a form feed or U+2028 in a message makes no new line.
    lines = traceback.rstrip("\n").split("\n")
    at = max((index + 1 for index, line in enumerate(lines) if line == _TRACEBACK), default=0)
    while at < len(lines) and lines[at].startswith(" "):
        at += 1
    return "\n".join(lines[:at]), "\n".join(lines[at:])


def _traceback(group: Sequence[WorkerTraceback], limit: int, names: ProcessNames) -> list[str]:
    """Show the traceback of the first of a group, and how the messages of the others differ."""
    calls, message = _split(group[0].traceback)
    by_message: dict[str, list[WorkerTraceback]] = {}
    bare = _split(_without_own_name(group[0]))[1]
    for one in group:
        is_same = _split(one.traceback)[1] == message  # a table that names all ranks, for instance
        key = bare if is_same else _split(_without_own_name(one))[1]
        by_message.setdefault(key, []).append(one)
    alike, *different = by_message.values()
    lines = [line for part in (calls, message) if part for line in part.split("\n")]
    if len(lines) > limit:
        head = min(_HEAD_LINES, limit // 2)
        lines = [
            *lines[:head],
            f"  ({len(lines) - limit} lines left out; -v shows them)",
            *lines[head - limit :],
        ]
    title = f"evidence: {'traceback' if calls else 'last words'} of {_ranks(group, names)}"
    if different:
        title += f", with the message of {_ranks(alike, names)}"
        known = message.split("\n")
        for some in different[:_MESSAGES]:
            own = _split(some[0].traceback)[1].split("\n")
            line = next((line for line in own if line not in known), own[0])
            lines.append(f"{_ranks(some, names)}: {line}")
        if len(different) > _MESSAGES:
            rest = [one for some in different[_MESSAGES:] for one in some]
            lines.append(f"{_ranks(rest, names)}: other messages")
    return [title, *_indent_lines(lines)]


def _ranks(raised: Sequence[WorkerTraceback], names: ProcessNames) -> str:
    return process_list((one.rank for one in raised), names)


def _indent_lines(lines: Sequence[str]) -> list[str]:
    return [f"  {escape(line)}".rstrip() for line in lines]


def _limit(count: int, *, is_whole: bool) -> int:
    return _WHOLE_LINES if is_whole else count


def _others(others: Sequence[SecondaryFailure], names: ProcessNames) -> list[str]:
    groups: dict[tuple[str, str], list[int]] = {}
    for other in sorted(others, key=lambda item: item.rank):
        program = f" ({other.program})" if other.program else ""
        groups.setdefault((program, other.activity), []).append(other.rank)
    shown = list(groups.items())
    rest: list[int] = []
    if len(shown) > _OTHER_LINES:
        rest = [rank for _, ranks in shown[_OTHER_LINES - 1 :] for rank in ranks]
        shown = shown[: _OTHER_LINES - 1]
    lines = [
        f"  {process_list(ranks, names)}{escape(program)}: {escape(activity)}"
        for (program, activity), ranks in shown
    ]
    return [*lines, f"  {process_list(rest, names)}: elsewhere"] if rest else lines


def _options_to_try(
    failure: FailureReport, arguments: Sequence[str], *, has_logs: bool
) -> list[list[str]]:
    rank = failure.rank
    options = []
    message = _split(failure.traceback)[1] or "\n".join(failure.last_lines)
    has_torch_env = failure.is_elastic or "--torch-env" in arguments
    if not has_torch_env and any(name in message for name in _OF_TORCH):
        options.append(["--torch-env"])
    if rank >= 0 and not (is_server(rank) or failure.is_elastic or "--debug" in arguments):
        options.append(["--debug", str(rank)])
    if not has_logs:
        options.append(["--log-dir", "logs"])
    return options
