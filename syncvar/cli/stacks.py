"""`syncvar stacks`: the stacks of the ranks and servers of a running job, from its launcher."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from syncvar.cli.running_jobs import add_job_argument, ask_job, choose_job, job_text
from syncvar.core.process_ids import process_list
from syncvar.core.stack_dump import StackFrame, activity_text, stack_text, visible_frames

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_job_argument(parser)
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
    path = choose_job(chosen.job)
    answer = ask_job(path, question="stacks", all_threads=chosen.all_threads)
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
    blocks = [f"job {job_text(answer['job'])}\n"]
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
