"""Carries a call of `sv.run` and its results to and from other hosts."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from syncvar.core.errors import WireError
from syncvar_launcher.hosts.agent_protocol import CALL_PART_NBYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_OF_THE_CALL = ("SYNCVAR_CALL_FD", "SYNCVAR_RESULT_DIR", "SYNCVAR_OUTCOME_FILE", "SYNCVAR_PASS_FDS")
_RESULT = re.compile(r"(?:result|error|of)\.\d{1,7}|unguarded")


def without_call(environ: Mapping[str, str] | None) -> dict[str, str]:
    """Return the environment of the program that reaches a host, without the call of `sv.run`.

    Messages carry the call to that host.
    """
    chosen = os.environ if environ is None else environ
    return {name: value for name, value in chosen.items() if name not in _OF_THE_CALL}


def call_parts(environ: Mapping[str, str]) -> Iterator[bytes]:
    """Yield the call that `sv.run` passed to the launcher, in parts; nothing without a call."""
    descriptor = int(environ.get("SYNCVAR_CALL_FD", "-1"))
    if descriptor < 0:
        return
    at = 0
    while part := os.pread(descriptor, CALL_PART_NBYTES, at):
        at += len(part)
        yield part


def forget_results(environ: Mapping[str, str]) -> None:
    """Remove what an earlier attempt has left for the caller: partial results, and exceptions."""
    folder = environ.get("SYNCVAR_RESULT_DIR")
    for path in Path(folder).glob("*") if folder is not None else ():
        if path.suffix == ".part" or path.name.startswith("error."):
            path.unlink(missing_ok=True)


def result_parts(folder: Path) -> Iterator[tuple[str, bytes, bool]]:
    """Yield what ranks have left in a folder, in parts.

    Each part is the name of a file, some bytes of it, and whether they are its last. After the
    last part of a file this function removes it.
    """
    for path in sorted(folder.iterdir()):
        if not _RESULT.fullmatch(path.name):
            continue  # still being written
        with path.open("rb") as file:
            part = file.read(CALL_PART_NBYTES)
            while following := file.read(CALL_PART_NBYTES):
                yield path.name, part, False
                part = following
            yield path.name, part, True
        path.unlink()


def keep_result(environ: Mapping[str, str], name: str, data: bytes, *, is_last: bool) -> None:
    """Append a part to a result, in the folder where the caller of `sv.run` looks for it."""
    folder = environ.get("SYNCVAR_RESULT_DIR")
    if folder is None or not _RESULT.fullmatch(name):
        raise WireError(f"a result {name[:40]!r} was not asked for")
    partial = Path(folder, f"{name}.part")
    with contextlib.suppress(FileNotFoundError):  # the caller has gone, and its folder with it
        with partial.open("ab") as file:
            file.write(data)
        if is_last:
            partial.rename(Path(folder, name))
