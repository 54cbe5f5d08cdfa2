"""`syncvar stacks`: the stacks of the ranks and servers of a running job, from its launcher."""

from __future__ import annotations

import contextlib
import os
import pwd
import socket
import struct
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack

from syncvar.bootstrap.job_private import holders_of_meetings
from syncvar.core.errors import ConfigError
from syncvar.core.process_ids import process_list
from syncvar.core.stack_dump import StackFrame, activity_text, stack_text, visible_frames

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping, Sequence


_SOCKET = "inquiries"
_LIMIT_S = 5.0  # the launcher itself waits 2 s for its ranks
_CREDENTIALS = struct.Struct("=iII")  # process, user, group


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "job",
        nargs="?",
        metavar="JOB",
        help="its name, or the process number of its syncvar-launch; the newest job otherwise",
    )
    parser.add_argument(
        "--all-threads",
        action="store_true",
        help="the stacks of all threads, not of the main thread alone",
    )
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="every frame, those of syncvar and of the interpreter's start too",
    )


def run(chosen: argparse.Namespace) -> int:
    """Print the stacks of a job; return 1 if a rank does not answer."""
    path, others = _find(chosen.job, os.environ)
    if others:
        sys.stderr.write(
            f"syncvar: {len(others) + 1} jobs are running; this is the newest. The others: "
            f"{'; '.join(map(_named, others))}\n"
        )
    answer = _ask(path, question="stacks", all_threads=chosen.all_threads)
    if answer is None:
        raise ConfigError(
            "the job has just ended, or its launcher does not answer (is it stopped?)"
        )
    print(stacks_text(answer, all_threads=chosen.all_threads, verbose=chosen.verbose), end="")
    return int(any(rank["threads"] is None for rank in answer["ranks"]))


def stacks_text(
    answer: Mapping[str, Any], *, all_threads: bool = False, verbose: bool = False
) -> str:
    """Return the stacks of all ranks and servers, equal ones once."""
    folder = answer["job"]["folder"]
    labels = _program_labels(answer["job"].get("programs", ()))
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank in answer["ranks"]:
        program = f" ({labels[rank['rank']]})" if rank["rank"] in labels else ""
        lines = [f"{program}: {_headline(rank, folder)}"]
        for ident, is_main, raw in rank["threads"] or ():
            frames = [StackFrame(*frame) for frame in raw]
            if all_threads:
                lines.append("main thread:" if is_main else f"thread {ident}:")
            indent = "  " * all_threads
            shown = frames if verbose else visible_frames(frames) or frames[:1]
            lines += [f"{indent}{one.file}:{one.line or '?'} in {one.name}" for one in shown]
        groups.setdefault(tuple(lines), []).append(rank["rank"])
    blocks = [f"job {_named(answer['job'])}\n"]
    for (headline, *rest), ranks in groups.items():
        blocks.append(f"{process_list(ranks)}{headline}\n")
        blocks += [f"  {line}\n" for line in rest]
    return "".join(blocks)


def _program_labels(programs: Sequence[tuple[str, int]]) -> dict[int, str]:
    """Return the program of each rank; empty for a job with one program."""
    labels = [label for label, workers in programs for _ in range(workers)]
    return dict(enumerate(labels)) if len(programs) > 1 else {}


def _headline(rank: Mapping[str, Any], folder: str) -> str:
    if rank["threads"] is None:
        return f"does not answer within 2 s (process {rank['pid']}); {rank['position']}"
    main = next((frames for _, is_main, frames in rank["threads"] if is_main), None)
    if main is None:
        return activity_text(rank["position"], rank["instead"])
    return activity_text(
        rank["position"], stack_text([StackFrame(*frame) for frame in main], folder)
    )


def _named(job: Mapping[str, Any]) -> str:
    ranks = f"{job['workers']} rank{'s' * (job['workers'] != 1)}"
    if servers := job["servers"]:
        ranks += f" and {servers} server{'s' * (servers != 1)}"
    since = f"since {job['lasted_s']:.0f} s"
    return f"{job['name']}: {ranks}, launcher {job['pid']}, {since}: {job['command']}"


# -- finding the job -------------------------------------------------------------------------------


def _find(name: str | None, environ: Mapping[str, str]) -> tuple[str, list[dict[str, Any]]]:
    """Return the socket of a job, and without a name also the other running jobs."""
    folders = _folders(environ)
    if name is not None and name.isdigit():
        folders = list(dict.fromkeys([*folders, *_folders(_environment_of(int(name)))]))
    found: list[tuple[str, dict[str, Any]]] = []
    for folder in folders:
        with contextlib.suppress(OSError):
            for entry in os.scandir(folder):
                path = os.path.join(entry.path, _SOCKET)
                answer = _ask(path, question="job")
                if answer is not None:
                    found.append((path, answer["job"]))
    found.sort(key=lambda one: one[1]["lasted_s"])
    if name is None:
        if not found:
            raise ConfigError(
                "no job of yours is running that syncvar-launch or sv.run has started (looked in "
                f"{', '.join(folders)}){_jobs_of_other_launchers(folders)}"
            )
        return found[0][0], [job for _, job in found[1:]]
    named = [one for one in found if name == str(one[1]["pid"])]
    named = named or [one for one in found if one[1]["name"].startswith(name)]
    if len(named) > 1:
        raise ConfigError(
            f"{len(named)} jobs have names that begin with {name!r}: "
            f"{'; '.join(_named(job) for _, job in named)}"
        )
    if not named:
        reason = _unknown_job(name, [job for _, job in found])
        raise ConfigError(reason + _jobs_of_other_launchers(folders))
    return named[0][0], []


def _unknown_job(name: str, jobs: Sequence[Mapping[str, Any]]) -> str:
    running = "; no job of yours is running"
    if jobs:
        running = f"; running: {'; '.join(map(_named, jobs))}"
    if name.isdigit():
        with contextlib.suppress(OSError):
            owner = os.stat(f"/proc/{name}").st_uid
            if owner != os.getuid():
                return f"process {name} belongs to {_user(owner)}, who alone can ask for its stacks"
            return f"process {name} is not the syncvar-launch of a running job{running}"
    return f"no running job is called {name!r}, and no launcher has that process number{running}"


def _jobs_of_other_launchers(folders: Sequence[str]) -> str:
    """Describe jobs of other launchers, which this command cannot ask; "" if there are none."""
    holders = [holder for folder in folders for holder in holders_of_meetings(Path(folder))]
    if not holders:
        return ""
    return (
        f". mpirun, srun or another launcher has started {len(holders)} that "
        f"run{'s' * (len(holders) == 1)} here (first rank: {', '.join(holders)}): syncvar stacks "
        "asks syncvar-launch, which such a job does not have. `py-spy dump --pid PROCESS` shows "
        "where one rank stands"
    )


def _user(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name}"
    except KeyError:
        return f"user {number}"


def _folders(environ: Mapping[str, str]) -> list[str]:
    """Return the possible private folders of this user's jobs."""
    user = os.getuid()
    parents = [environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{user}"]
    shared = [environ.get("TMPDIR", ""), "/tmp"]  # noqa: S108  (`_ask` checks the owner)
    found = [os.path.join(parent, "syncvar") for parent in parents if parent]
    found += [os.path.join(parent, f"syncvar-{user}") for parent in shared if parent]
    return list(dict.fromkeys(found))


def _environment_of(pid: int) -> dict[str, str]:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        pairs = (item.partition(b"=") for item in file.read().split(b"\0"))
        return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
    return {}


def _ask(path: str, **request: Any) -> dict[str, Any] | None:
    """Return a launcher's answer; None without a launcher of this user, or without an answer."""
    with (
        contextlib.suppress(OSError, ValueError, msgpack.UnpackException),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as end,
    ):
        end.settimeout(_LIMIT_S)
        end.connect(path)
        _, user, _ = _CREDENTIALS.unpack(
            end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if user == os.getuid():
            end.sendall(msgpack.packb(request))
            answer: dict[str, Any] = msgpack.unpackb(b"".join(_received(end)), strict_map_key=True)
            return answer
    return None


def _received(end: socket.socket) -> Iterable[bytes]:
    while data := end.recv(1 << 16):
        yield data
