"""Horovod's interface for PyTorch: write `import syncvar.compat.horovod.torch as hvd`.

`python -m syncvar.compat.horovod SCRIPT` runs a program without any change.
"""

from __future__ import annotations

from typing import Any, NoReturn

from syncvar.core.errors import UsageError


def run(*_arguments: Any, **_options: Any) -> NoReturn:
    """Refuse to start workers: that is the task of `sv.run` or of the launcher.

    Raises:
        UsageError: Always.

    Example:
        >>> from syncvar.compat import horovod
        >>> horovod.run(print, np=2)
        Traceback (most recent call last):
        ...
        syncvar.core.errors.UsageError: horovod.run is sv.run(fn, workers=4); ...
    """
    raise UsageError(
        "horovod.run is sv.run(fn, workers=4); or start the script with "
        "`syncvar-launch --workers 4 SCRIPT`"
    )
