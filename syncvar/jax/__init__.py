"""Collectives and messages that work inside programs of JAX: `jit`, `grad`, `vmap`, `scan`.

    pip install 'syncvar[jax]'

    from syncvar import jax as svj
    total = jax.jit(lambda x: svj.all_reduce(x) + 1)(x)

All ranks run the same program. Its calls happen in the order of the program, also those of several
compiled functions. Shapes are known when JAX traces, so every rank passes arrays of one shape.

Derivatives follow two rules. The result of `all_reduce` is one value that all ranks share, so its
cotangent goes back unchanged; mpi4jax does the same. All other results belong to their rank, so the
cotangents of all ranks return along the way that the values came: that of `all_gather` is a
`reduce_scatter`, and so on. `sum_gradients` marks a value that all ranks share and use differently.
Only sums and means have derivatives.

If a call fails inside a compiled function, JAX raises `JaxRuntimeError` with the text of our error.
Later compiled calls of the rank may fail too, so let the job end. Outside of compiled functions the
error is our own, such as MismatchError.

Before a call of `sv` itself, wait for the results of compiled functions, for example with
`jax.effects_barrier()`: JAX may still run their calls.
"""

from __future__ import annotations

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"syncvar.jax needs JAX, which cannot be imported ({error}): pip install 'syncvar[jax]'"
    ) from error

from syncvar.jax.jax_collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    recv,
    reduce_scatter,
    send,
    sendrecv,
    sum_gradients,
)

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "recv",
    "reduce_scatter",
    "send",
    "sendrecv",
    "sum_gradients",
]
