"""A check for tests: a program makes no more calls, and moves no more bytes, than before."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING

from syncvar.bootstrap.process import ledger, rank
from syncvar.core.errors import ConfigError
from syncvar.runtime.call_ledger import Ledger, compare_ledgers

if TYPE_CHECKING:
    from collections.abc import Iterator

UPDATE_VARIABLE = "SYNCVAR_UPDATE_LEDGER"


@contextlib.contextmanager
def assert_ledger(
    file: str | os.PathLike[str], *, tolerance: float = 0.1, update: bool = False
) -> Iterator[Ledger]:
    """Compare the calls of a `with` block with a saved ledger.

    The block fails if a variable or a collective has more calls or bytes than the file says.
    Calls are compared by variable, collective and function; lines may move. Rank 0 compares and
    writes its own calls. The other ranks only run the block.

    Args:
        file: Path of the saved ledger, which belongs to the program like its tests.
        tolerance: Growth that is no failure, as a share: 0.1 allows 10 % more.
        update: Write the file instead. The environment variable SYNCVAR_UPDATE_LEDGER=1 does so
            too.

    Returns:
        A context manager that gives the `Ledger` of the block.

    Raises:
        AssertionError: There are more calls or bytes; the text names each, and the remedy.
        ConfigError: The file is missing, or is no ledger. Raised before the block runs.

    Cost:
        That of `sv.ledger`.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> import syncvar as sv
        >>> folder = tempfile.TemporaryDirectory()
        >>> file = f"{folder.name}/ledger.json"
        >>> def step(count):
        ...     for _ in range(count):
        ...         sv.all_reduce(np.ones(10))
        >>> with assert_ledger(file, update=True):
        ...     step(2)
        >>> with assert_ledger(file):
        ...     step(4)
        Traceback (most recent call last):
        ...
        AssertionError: the program makes more calls, or moves more bytes, than ...
        >>> folder.cleanup()
    """
    updates = update or os.environ.get(UPDATE_VARIABLE, "") not in ("", "0")
    path, is_judge = os.fspath(file), rank() == 0
    saved = _saved(path) if is_judge and not updates else None
    with ledger() as counted:
        yield counted
    if is_judge and updates:
        counted.save(path)
    elif saved is not None:
        grown = [
            one for one in compare_ledgers(saved, counted) if one.new > one.old * (1 + tolerance)
        ]
        if grown:
            lines = "".join(f"  {one.describe()}\n" for one in grown)
            raise AssertionError(
                f"the program makes more calls, or moves more bytes, than {path} allows "
                f"(tolerance {tolerance:.0%}):\n{lines}"
                f"If that is right, accept it: run the test with {UPDATE_VARIABLE}=1, and commit "
                "the file"
            )


def _saved(path: str) -> Ledger:
    if not os.path.exists(path):
        raise ConfigError(
            f"there is no ledger {path} to compare with: run the test once with "
            f"{UPDATE_VARIABLE}=1, which writes it, and commit the file"
        )
    return Ledger.load(path)
