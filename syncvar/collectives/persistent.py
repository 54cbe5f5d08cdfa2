"""Persistent calls of the program: a collective with its arguments, made again and again.

`PersistentCollective` keeps function and arguments only. The function finds its persistent call by
itself, as it does for every repeated call.
"""

from __future__ import annotations

import reprlib
from functools import partial
from inspect import signature
from typing import TYPE_CHECKING, Any

from syncvar.collectives.collective_registry import available
from syncvar.core.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from syncvar.runtime.work import Work


class PersistentCollective:
    """A collective or message with its arguments; `sv.persistent` makes it.

    `call()` makes the call and returns its result. `call.start()` and `call.wait()` do so in two
    steps. The object keeps references to the input and to `out`. Each call reads the input anew.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> x = np.zeros(2)
        >>> call = sv.persistent(sv.all_reduce, x)
        >>> call
        <persistent all_reduce(float64[2])>
        >>> x += 3
        >>> call()
        array([3., 3.])
    """

    __slots__ = ("_arguments", "_call", "_name", "_options", "_starts", "_work")

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: tuple[Any, ...],
        options: Mapping[str, Any],
    ) -> None:
        self._name = name
        self._arguments = arguments
        self._options = options
        self._call = partial(function, *arguments, **options)
        self._starts = 0
        self._work: Work | None = None  # started, and its result not taken

    def __repr__(self) -> str:
        shown = [_shown(one) for one in self._arguments]
        shown += [f"{key}={_shown(one)}" for key, one in self._options.items()]
        return f"<persistent {self._name}({', '.join(shown)})>"

    def __call__(self) -> Any:
        """Make the call and return its result.

        Returns:
            The result of the function, or `out`.

        Raises:
            UsageError: The call has been started, and nobody has waited for it.
            SyncvarError: The error of the function.

        Cost: that of the function.

        Example:
            >>> import numpy as np, syncvar as sv
            >>> sv.persistent(sv.broadcast, np.ones(2), root=0)()
            array([1., 1.])
        """
        if self._work is not None:
            self._require_idle()
        return self._call()

    def start(self) -> Work:
        """Start the call, which reads its input now.

        Returns:
            The `Work` of this start, for `sv.wait_all`, `sv.wait_any` and `await`. To take its
            result by `work.wait()` or `await` counts as `wait`.

        Raises:
            UsageError: The call has been started, and nobody has waited for it.

        Cost: that of the function with `async_op=True`.
        Source: MPI_Start, which has one request for all starts.

        Example:
            >>> import numpy as np, syncvar as sv
            >>> calls = [sv.persistent(sv.all_reduce, np.full(2, n)) for n in (1, 2)]
            >>> sv.wait_all([call.start() for call in calls])
            [array([1, 1]), array([2, 2])]
        """
        if self._work is not None:
            self._require_idle()
        work: Work = self._call(async_op=True)
        self._work = work
        self._starts += 1
        return work.then(partial(self._took, self._starts))

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the started call and return its result; then it can be started again.

        Args:
            timeout: Seconds from now, as for `Work.wait`.

        Returns:
            The result of the function, or `out`.

        Raises:
            UsageError: The call has not been started since the last wait.
            SyncvarError: The error of the call.

        Cost: no message.
        Source: MPI_Wait.

        Example:
            >>> import numpy as np, syncvar as sv
            >>> call = sv.persistent(sv.all_reduce, np.ones(2))
            >>> work = call.start()
            >>> call.wait()
            array([1., 1.])
        """
        work = self._work
        if work is None:
            raise UsageError(
                f"{self!r} has not been started since the last wait: write call.start() before "
                "call.wait(), or call() for both"
            )
        try:
            return work.wait(timeout)
        except BaseException:
            if work.done():  # not after a wrong timeout
                self._work = None
            raise

    def done(self) -> bool:
        """Return whether no started call is in progress; makes a little progress.

        Example:
            >>> import numpy as np, syncvar as sv
            >>> sv.persistent(sv.all_reduce, np.ones(2)).done()
            True
        """
        return self._work is None or self._work.done()

    def _took(self, start: int, result: Any) -> Any:
        """Note that the program has taken the result of a start; later starts are not affected."""
        if self._starts == start:
            self._work = None
        return result

    def _require_idle(self) -> None:
        """Raise UsageError if a start may still be running, or its result has not been taken."""
        work = self._work
        if work is not None and not (work.done() and work.has_failed):
            raise UsageError(
                f"{self!r} has been started, and nobody has waited for it: write call.wait() "
                "before the next call() or call.start()"
            )
        self._work = None


def _shown(value: Any) -> str:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is None or shape is None:
        return reprlib.repr(value)
    return f"{dtype}{list(shape)}"


def persistent_functions() -> dict[str, Callable[..., Any]]:
    """Return the functions that `persistent` takes, by name."""
    return {
        name: function
        for one in available()
        for name, function in zip(one.names, one.functions, strict=True)
        if "async_op" in signature(function).parameters and not name.endswith("_object")
    }


def persistent(
    function: Callable[..., Any], *arguments: Any, **options: Any
) -> PersistentCollective:
    """Keep a collective with its arguments, to make the same call many times.

    Args:
        function: `send`, `recv`, or a collective with `async_op` that takes no objects.
        arguments: Its positional arguments. Arrays are kept, not copied: change them in place.
        options: Its keyword arguments, for instance `out`, `op`, `group` and `timeout`; not
            `async_op`.

    Returns:
        An object to call, or to start and wait for. The ranks make no call yet, and check the
        arguments at each call.

    Raises:
        ConfigError: The function is another one, or `async_op` is given.

    Cost: no message. Calls cost what the function costs.
    Source: MPI_Allreduce_init.

    Example:
        >>> import numpy as np, syncvar as sv
        >>> x, total = np.ones(2), np.empty(2)
        >>> call = sv.persistent(sv.all_reduce, x, out=total)
        >>> for step in range(3):
        ...     x[:] = step
        ...     work = call.start()
        ...     assert call.wait() is total
        >>> total
        array([2., 2.])
    """
    accepted = persistent_functions()
    name = getattr(function, "__name__", None) or reprlib.repr(function)
    if not any(function is one for one in accepted.values()):
        raise ConfigError(f"persistent takes no {name}: pass one of sv.{', sv.'.join(accepted)}")
    if "async_op" in options:
        raise ConfigError(
            f"persistent({name}, …) takes no async_op: write call.start() and call.wait() instead"
        )
    return PersistentCollective(name, function, arguments, options)
