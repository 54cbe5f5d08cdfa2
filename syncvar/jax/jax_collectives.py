"""The public functions of `syncvar.jax`: check the arguments, then bind a primitive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
from jax import numpy as jnp

from syncvar.core.errors import ConfigError
from syncvar.core.reduce_ops import op_name
from syncvar.jax.jax_primitives import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    BARRIER,
    BROADCAST,
    RECV,
    REDUCE_SCATTER,
    SEND,
    SENDRECV,
    SUM_GRADIENTS,
    CallOptions,
    size_of,
)

if TYPE_CHECKING:
    from syncvar.collectives.groups import Group

_PAIRS = ("minloc", "maxloc")


def all_reduce(x: Any, op: str = "sum", *, group: Group | None = None) -> Any:
    """Combine the values of all ranks and give every rank the result, inside programs of JAX.

    The derivative of a sum or mean treats the result as one value that all ranks share. Tangents
    are combined as values are. A cotangent goes back unchanged; for a mean, divided by the number
    of ranks. So `jax.grad` of `all_reduce(loss)` is this rank's part of the gradient.

    Args:
        x: Array, or pytree of arrays, of one shape and dtype on all ranks. Integers become floats
            in a mean.
        op: Name of the op, as for `sv.all_reduce`; not `minloc` and `maxloc`.
        group: Ranks that take part; None means the world.

    Returns:
        The same pytree of combined arrays.

    Raises:
        ConfigError: The op is unknown, or gives pairs.
        UsageError: You differentiate an op other than sum and mean.

    Cost: that of one `sv.all_reduce` of the pytree, and a callback from the compiled program.
    Order: that of `sv.all_reduce`; the bytes are equal on every rank.
    Source: mpi4jax.allreduce has the same derivative.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from syncvar import jax as svj
        >>> jax.jit(svj.all_reduce)(jnp.ones(2))
        Array([1., 1.], dtype=float32)
    """
    name = _checked_op(op)
    leaves, structure = jax.tree.flatten(x)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    if name == "mean":
        arrays = [_as_inexact(one) for one in arrays]
    if arrays:
        arrays = ALL_REDUCE.bind(*arrays, options=CallOptions(group, name))
    return jax.tree.unflatten(structure, arrays)


def sum_gradients(x: Any, *, group: Group | None = None) -> Any:
    """Return a value that all ranks share; its gradient is the sum over all ranks.

    Apply it to parameters that each rank uses with its own data. Then `jax.grad` of
    `all_reduce(loss)` is the same whole gradient on every rank.

    Args:
        x: Array, or pytree of arrays, equal on all ranks.
        group: Ranks that share it; None means the world.

    Returns:
        `x`.

    Cost: nothing forward; backward one `all_reduce` of the pytree.
    Source: the transpose of `all_reduce`, called pvary or pbroadcast in JAX.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from syncvar import jax as svj
        >>> loss = lambda w: svj.all_reduce(jnp.sum(svj.sum_gradients(w) ** 2))
        >>> jax.grad(loss)(jnp.ones(2))
        Array([2., 2.], dtype=float32)
    """
    leaves, structure = jax.tree.flatten(x)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    if arrays:
        arrays = SUM_GRADIENTS.bind(*arrays, options=CallOptions(group))
    return jax.tree.unflatten(structure, arrays)


def broadcast(x: Any, root: int = 0, *, group: Group | None = None) -> Any:
    """Give every rank the root's value, inside programs of JAX.

    Args:
        x: Array, or pytree of arrays, of one shape and dtype on all ranks.
        root: Rank of the group whose value is sent.
        group: Ranks that take part; None means the world.

    Returns:
        The root's value. Its gradient is summed on the root; the other ranks get zeros.

    Cost: that of one `sv.broadcast`, and a callback from the compiled program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from syncvar import jax as svj
        >>> jax.jit(svj.broadcast)({"w": jnp.ones(2)})
        {'w': Array([1., 1.], dtype=float32)}
    """
    root = _checked_rank("root", root, group)
    leaves, structure = jax.tree.flatten(x)
    arrays = [jnp.asarray(leaf) for leaf in leaves]
    if arrays:
        arrays = BROADCAST.bind(*arrays, options=CallOptions(group, root=root))
    return jax.tree.unflatten(structure, arrays)


def all_gather(x: Any, *, axis: int = 0, group: Group | None = None) -> Any:
    """Concatenate the arrays of all ranks, in rank order, inside programs of JAX.

    Args:
        x: Array of one shape and dtype on all ranks; a number counts as length 1.
        axis: Axis along which to concatenate; may be negative.
        group: Ranks that take part; None means the world.

    Returns:
        The concatenation. Its cotangent goes back by a `reduce_scatter`.

    Raises:
        ConfigError: The array has no such axis.

    Cost: that of `sv.all_gather`, and a callback from the compiled program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from syncvar import jax as svj
        >>> jax.jit(svj.all_gather)(jnp.arange(3))
        Array([0, 1, 2], dtype=int32)
    """
    array = jnp.atleast_1d(jnp.asarray(x))
    options = CallOptions(group, axis=_checked_axis(axis, array))
    return ALL_GATHER.bind(array, options=options)[0]


def reduce_scatter(x: Any, op: str = "sum", *, axis: int = 0, group: Group | None = None) -> Any:
    """Combine the arrays of all ranks, and give each rank its piece, inside programs of JAX.

    Args:
        x: Array of one shape and dtype on all ranks. The number of ranks divides its length along
            `axis`.
        op: Name of the op, as for `sv.reduce_scatter`; not `minloc` and `maxloc`.
        axis: Axis that is cut; may be negative.
        group: Ranks that take part; None means the world.

    Returns:
        This rank's piece. Its cotangent goes back by an `all_gather`.

    Raises:
        ConfigError: The axis cannot be cut into equal pieces.
        UsageError: You differentiate an op other than sum and mean.

    Cost: that of `sv.reduce_scatter`, and a callback from the compiled program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from syncvar import jax as svj
        >>> jax.jit(svj.reduce_scatter)(jnp.ones(2))
        Array([1., 1.], dtype=float32)
    """
    name, array = _checked_op(op), jnp.asarray(x)
    if name == "mean":
        array = _as_inexact(array)
    place = _divisible_axis("reduce_scatter", axis, array, group)
    return REDUCE_SCATTER.bind(array, options=CallOptions(group, name, place))[0]


def all_to_all(x: Any, *, axis: int = 0, group: Group | None = None) -> Any:
    """Send part d of an array to rank d, and join the parts that arrive, inside programs of JAX.

    Args:
        x: Array of one shape and dtype on all ranks. The number of ranks divides its length along
            `axis`.
        axis: Axis that is cut into one part for each rank; may be negative.
        group: Ranks that take part; None means the world.

    Returns:
        An array like `x`: the parts in the order of the ranks that sent them. Its cotangent goes
        back the same way.

    Raises:
        ConfigError: The axis cannot be cut into equal parts.

    Cost: that of `sv.all_to_all`, and a callback from the compiled program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from syncvar import jax as svj
        >>> jax.jit(svj.all_to_all)(jnp.arange(2))
        Array([0, 1], dtype=int32)
    """
    array = jnp.asarray(x)
    place = _divisible_axis("all_to_all", axis, array, group)
    return ALL_TO_ALL.bind(array, options=CallOptions(group, axis=place))[0]


def send(x: Any, dest: int, *, tag: int = 0, group: Group | None = None) -> None:
    """Send an array to another rank, inside programs of JAX.

    Without result there is no derivative: use `sendrecv` where you need one.

    Args:
        x: Array.
        dest: Rank of the group that receives it, by `recv` of this module or of `sv`.
        tag: Integer from 0 to 2**31 - 1; the receiver passes the same.
        group: Group of `dest`; None means the world.

    Raises:
        UsageError: You differentiate with respect to `x`.

    Cost: that of `sv.send`, and a callback from the compiled program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from syncvar import jax as svj
        >>> def to_myself(x):
        ...     svj.send(x, 0)
        ...     return svj.recv(x, 0)
        >>> jax.jit(to_myself)(jnp.ones(2))
        Array([1., 1.], dtype=float32)
    """
    options = CallOptions(group, dest=_checked_rank("dest", dest, group), tag=int(tag))
    SEND.bind(jnp.asarray(x), options=options)


def recv(like: Any, source: int, *, tag: int = 0, group: Group | None = None) -> Any:
    """Receive an array from another rank, inside programs of JAX.

    Args:
        like: Array, or `jax.ShapeDtypeStruct`, of the message's shape and dtype.
        source: Rank of the group that sends it.
        tag: Tag of the message, as the sender passes it.
        group: Group of `source`; None means the world.

    Returns:
        The array. It depends on no value of this rank, so it has no gradient here.

    Raises:
        ConfigError: The message is not like `like`.

    Cost: that of `sv.recv`, and a callback from the compiled program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from syncvar import jax as svj
        >>> svj.send(jnp.ones(2), 0)
        >>> svj.recv(jax.ShapeDtypeStruct((2,), "float32"), 0)
        Array([1., 1.], dtype=float32)
    """
    options = CallOptions(group, source=_checked_rank("source", source, group), tag=int(tag))
    return RECV.bind(_template(like), options=options)[0]


def sendrecv(  # noqa: PLR0913  (public signature)
    x: Any,
    dest: int | None,
    source: int | None,
    *,
    tag: int = 0,
    recv_tag: int | None = None,
    like: Any = None,
    group: Group | None = None,
) -> Any:
    """Send an array to one rank and receive one from another, inside programs of JAX.

    Args:
        x: Array.
        dest: Rank of the group that receives `x`. None sends nothing.
        source: Rank of the group that sends the result. None receives nothing.
        tag: Tag of the message sent, from 0 to 2**31 - 1.
        recv_tag: Tag of the message received. None means `tag`.
        like: Array, or `jax.ShapeDtypeStruct`, of the received shape and dtype. None means `x`.
        group: Group of `dest` and `source`; None means the world.

    Returns:
        The array received; zeros if `source` is None. Its cotangent goes back to the sender.

    Raises:
        ConfigError: The message is not like `like`.

    Cost: that of `sv.sendrecv`, and a callback from the compiled program.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from syncvar import jax as svj
        >>> jax.grad(lambda x: 3 * svj.sendrecv(x, 0, 0))(2.0)
        Array(3., dtype=float32)
    """
    array = jnp.asarray(x)
    options = CallOptions(
        group,
        dest=None if dest is None else _checked_rank("dest", dest, group),
        source=None if source is None else _checked_rank("source", source, group),
        tag=int(tag),
        recv_tag=int(tag if recv_tag is None else recv_tag),
    )
    return SENDRECV.bind(array, array if like is None else _template(like), options=options)[0]


def barrier(*, group: Group | None = None) -> None:
    """Wait until every rank of the group has come to this place of the program.

    Args:
        group: Ranks that wait for each other; None means the world.

    Cost: that of `sv.barrier`, and a callback from the compiled program.

    Example:
        >>> from syncvar import jax as svj
        >>> svj.barrier()
    """
    BARRIER.bind(options=CallOptions(group))


def _checked_op(op: Any) -> str:
    name = op_name(op)
    if not isinstance(name, str) or name in _PAIRS:
        raise ConfigError(f"op must be the name of an op with one result, not {op!r}")
    return name.lower()


def _checked_rank(name: str, rank: Any, group: Group | None) -> int:
    """Return a rank that does not depend on traced values, or raise ConfigError."""
    if isinstance(rank, jax.core.Tracer):
        raise ConfigError(f"{name} must be a number that JAX does not trace: make it static")
    size = size_of(group)
    if not 0 <= int(rank) < size:
        raise ConfigError(f"{name} must be a rank from 0 to {size - 1}, not {rank}")
    return int(rank)


def _checked_axis(axis: int, array: Any) -> int:
    if not -array.ndim <= axis < array.ndim:
        raise ConfigError(f"axis {axis} is outside an array of {array.ndim} dimensions")
    return axis % int(array.ndim)


def _divisible_axis(name: str, axis: int, array: Any, group: Group | None) -> int:
    """Return an axis that can be cut into equal parts, or raise ConfigError."""
    place, size = _checked_axis(axis, array), size_of(group)
    if array.shape[place] % size:
        raise ConfigError(
            f"syncvar.jax.{name} cuts axis {axis} into {size} equal parts, but its length is "
            f"{array.shape[place]}: pad the array"
        )
    return place


def _as_inexact(array: Any) -> Any:
    """Return an array of floats, as a mean gives them."""
    return array if jnp.issubdtype(array.dtype, jnp.inexact) else array.astype(float)


def _template(like: Any) -> Any:
    is_spec = isinstance(like, jax.ShapeDtypeStruct)
    return jnp.zeros(like.shape, like.dtype) if is_spec else jnp.asarray(like)
