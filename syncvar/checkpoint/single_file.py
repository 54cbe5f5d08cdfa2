"""`sv.save` and `sv.load`: one file, written and read by one rank without the others.

The file is safetensors: every array is a tensor under its path ("model/w"), which other tools can
read. The header holds the rest of the value, and its structure, as packed data.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import reprlib
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from syncvar.checkpoint.checkpoint import Checkpoint
from syncvar.checkpoint.checkpoint_format import (
    CODES,
    DIGEST_BYTES,
    MANIFEST,
    Tensor,
    checked_path,
    header_bytes,
    header_length,
    parse_header,
    stored_shape,
)
from syncvar.checkpoint.checkpoint_reader import bytes_of
from syncvar.checkpoint.folder import CheckpointFolder, make_folder, read_into
from syncvar.checkpoint.server_leaves import snapshot_for_file
from syncvar.core.array_arguments import as_array
from syncvar.core.array_types import DTYPE_NAMES, dtype_from_index
from syncvar.core.errors import CheckpointError, ConfigError, Corrupt, NotFound, WireError
from syncvar.optimizers import Optimizer
from syncvar.parameter_server.server_variables import ServerVariable
from syncvar.protocol.object_codec import DEPTH_MAX, pack_object, unpack_object
from syncvar.variables.policy import VariableAggregation, VariableSynchronization
from syncvar.variables.variable import Variable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    Path = tuple[Any, ...]
    Arrays = dict[Path, NDArray[Any]]

_FORMAT = "syncvar.save"
_VERSION = "1"
_KEYS = {"content", "digest"}  # metadata that only files of `save` have
_PLAIN_BYTES_MAX = 8 << 20
_ATOMS = frozenset((type(None), bool, int, float, complex, bytes))
_NESTED_MAX = DEPTH_MAX - 1  # the value is packed in a list
_DTYPES = {code: name for name, code in CODES.items() if not name.startswith("complex")}


def save(path: Any, value: Any) -> str:
    """Write a value to one file, on this rank alone.

    No other rank takes part, so `if sv.rank() == 0: sv.save(…)` is correct. The file appears
    complete and on disk, or not at all; it replaces an existing one at once. `sv.load` and other
    safetensors readers read it. To save on all ranks together, use a `Checkpoint`.

    Args:
        path: Path of the file; missing folders are created. The last of several ranks wins.
        value: Arrays, variables, optimizers, objects with `state_dict()`, NumPy generators, plain
            data, and nested dicts, lists and tuples of them. Of a variable, this replica's copy is
            saved: for ON_WRITE that is the value, for NONE its own.

    Returns:
        The path.

    Raises:
        ConfigError: One rank cannot save an object, such as an ON_READ variable, whose value
            combines the copies of all replicas. Nothing is written.
        CheckpointError: The file cannot be written. An existing file is unchanged.

    Cost: Every byte is read twice (once for the digest) and written once. Nothing is sent.

    Example:
        >>> import os, tempfile, syncvar as sv
        >>> w = sv.Variable([1.0, 2.0])
        >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
        >>> if sv.rank() == 0:
        ...     _ = sv.save(path, {"w": w, "step": 7})
        >>> sv.load(path)
        {'w': array([1., 2.], dtype=float32), 'step': 7}
    """
    where = checked_path(path, "sv.save('model.safetensors', …)")
    if os.path.isdir(where):
        raise ConfigError(
            f"{where} is a folder; sv.save writes one file: "
            f"sv.save({os.path.join(where, 'model.safetensors')!r}, …)"
        )
    arrays: Arrays = {}
    skeleton = _without_arrays(value, (), arrays, (), _on_servers(value))
    names = _names_of(arrays)
    locations = [
        [list(place), name, array.dtype.name, list(array.shape)]
        for (place, array), name in zip(arrays.items(), names, strict=True)
    ]
    content = pack_object([skeleton, locations])
    if len(content) > _PLAIN_BYTES_MAX:
        raise ConfigError(
            f"non-array data of sv.save takes {len(content)} bytes, more than {_PLAIN_BYTES_MAX}: "
            f"store large values as NumPy arrays, np.array(values)"
        )
    digest = hashlib.blake2b(content, digest_size=DIGEST_BYTES)
    for array in arrays.values():
        digest.update(bytes_of(array))
    about = {
        "format": _FORMAT,
        "version": _VERSION,
        "digest": digest.hexdigest(),
        "content": base64.b64encode(content).decode(),
    }
    named = zip(names, arrays.values(), strict=True)
    header = header_bytes([(name, x.dtype.name, x.shape) for name, x in named], about)[0]

    def stream() -> Iterator[memoryview]:
        yield memoryview(header)
        for array in arrays.values():
            yield bytes_of(array)

    above, name = os.path.split(os.path.abspath(where))
    with make_folder(above) as folder:
        folder.write(name, stream(), secrets.token_hex(8))
    return where


def load(path: Any) -> Any:
    """Read a file of `save`, on this rank alone; or any safetensors file, as a dict of arrays.

    Args:
        path: Path of the file.

    Returns:
        The value. It has arrays instead of arrays, variables and tensors, the result of
        `state_dict()` instead of objects that have it, and dicts instead of their subclasses. For a
        PyTorch module, pass `{name: torch.from_numpy(x) for name, x in sv.load(path).items()}`. (A
        `Checkpoint` restores tensors as tensors.)

    Raises:
        NotFound: The file does not exist.
        Corrupt: Its bytes have changed.
        CheckpointError: It is not a safetensors file, or cannot be read.

    Cost: Every byte is read once, and once more for the digest. Nothing is sent, and no data from
        the file is executed.

    Example:
        >>> import os, tempfile, syncvar as sv
        >>> path = os.path.join(tempfile.mkdtemp(), "step.safetensors")
        >>> _ = sv.save(path, {"step": 7, "w": [1.0, 2.0]})
        >>> sv.load(path)["step"]
        7
    """
    where = checked_path(path, "sv.load('model.safetensors')")
    if os.path.isdir(where):
        note = ""
        if os.path.exists(os.path.join(where, MANIFEST)):
            note = " of a Checkpoint, which all ranks restore together: Checkpoint(…).restore(path)"
        raise CheckpointError(f"{where} is a folder{note}; sv.load reads one file")
    tensors, about, data = _read_file(where)
    if not _KEYS & about.keys():
        return {
            one.name: _array(data[one.name], _DTYPES[one.dtype], one.shape)
            for one in tensors.values()
        }
    if (about.get("format"), about.get("version")) != (_FORMAT, _VERSION):
        raise CheckpointError(
            f"{where} has format {about.get('format')!r:.20}, version "
            f"{about.get('version')!r:.20}; this syncvar reads {_FORMAT!r}, version {_VERSION!r}"
        )
    try:
        content = base64.b64decode(about.get("content", ""), validate=True)
        actual = hashlib.blake2b(content, digest_size=DIGEST_BYTES)
        for one in data.values():
            actual.update(one.data)
        if actual.hexdigest() != about.get("digest"):
            raise Corrupt(where, str(about.get("digest"))[:64], actual.hexdigest())
        skeleton, locations = unpack_object(content)
        found = {
            tuple(place): _array(data[key], dtype, tuple(shape), tensors[key])
            for place, key, dtype, shape in locations
        }
    except (binascii.Error, WireError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{where} is not of the right form: {type(error).__name__}: {str(error)[:200]}"
        ) from None
    return _with_arrays(skeleton, (), found)


def _read_file(where: str) -> tuple[dict[str, Tensor], dict[str, str], dict[str, NDArray[Any]]]:
    """Return the tensors of a safetensors file, the texts of its header, and the tensors' bytes."""
    above, name = os.path.split(os.path.abspath(where))
    try:
        folder = CheckpointFolder(above)
    except NotFound:
        raise NotFound(f"there is no file {where}: no such folder") from None
    with folder, folder.reading(name) as (descriptor, nbytes):
        prefix = bytearray(min(8, nbytes))
        read_into(descriptor, memoryview(prefix), 0, where)
        header = bytearray(header_length(bytes(prefix), nbytes))
        read_into(descriptor, memoryview(header), 0, where)
        tensors, about = parse_header(bytes(header), nbytes)
        ordered = sorted(tensors.values(), key=lambda one: (one.start, one.stop))
        data = {
            one.name: _read(descriptor, len(header) + one.start, one.stop - one.start, where)
            for one in ordered
        }
    return tensors, about, data


def _on_servers(value: Any) -> dict[int, Any]:
    """Return one version of the server-side data in a value, by `id` of its owner."""
    variables: list[ServerVariable] = []
    optimizers: list[Optimizer] = []
    waiting, seen = [value], set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, ServerVariable):
            variables.append(one)
        elif isinstance(one, Optimizer):
            optimizers.append(one)
        elif isinstance(one, dict):
            waiting += one.values()
        elif type(one) in (list, tuple):
            waiting += one
    values, slots = snapshot_for_file(variables, optimizers)
    return {**values, **slots}


def _without_arrays(  # noqa: C901, PLR0911  (one branch for each type)
    value: Any, place: Path, arrays: Arrays, above: tuple[int, ...], on_servers: dict[int, Any]
) -> Any:
    """Return a value without its arrays, which go into `arrays` by their path."""
    if type(value) in _ATOMS:
        return value
    shown = _shown(place)
    if isinstance(value, str | np.generic):
        return _packable(value, shown)
    if id(value) in above:
        raise ConfigError(f"{shown} holds itself, so its nesting has no end")
    if len(above) >= _NESTED_MAX:
        raise ConfigError(f"{shown} is nested more than {_NESTED_MAX} deep, and cannot be saved")
    above = (*above, id(value))
    if id(value) in on_servers:
        return _without_arrays(on_servers[id(value)], place, arrays, above, {})
    if isinstance(value, Checkpoint):
        raise ConfigError(
            f"{shown} is a Checkpoint, which all its ranks save together: call "
            f"checkpoint.save(path) on every rank"
        )
    if isinstance(value, Variable):
        _require_own(value, shown)
        arrays[place] = np.ascontiguousarray(value.local_value()).reshape(value.shape)
        return None
    if isinstance(value, dict):
        return {
            _checked_key(key, shown): _without_arrays(
                item, (*place, key), arrays, above, on_servers
            )
            for key, item in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(
            _without_arrays(item, (*place, index), arrays, above, on_servers)
            for index, item in enumerate(value)
        )
    if (state := _state_of(value)) is not value:
        return _without_arrays(state, place, arrays, above, on_servers)
    if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
        array = as_array(value, shown)
        # A copy, since another thread may write to the array meanwhile.
        arrays[place] = np.array(array, order="C", copy=True)
        return None
    return _packable(value, shown)


def _state_of(value: Any) -> Any:
    """Return the state to save instead of an object, or the object if it has none."""
    if isinstance(value, Optimizer):
        return {**value.tracked(), **value.slots.waiting_by_name()}
    if callable(getattr(value, "tracked", None)):
        return value.tracked()
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return value.state_dict() if callable(getattr(value, "state_dict", None)) else value


def _packable(value: Any, shown: str) -> Any:
    try:
        pack_object(value)
    except ConfigError as error:
        raise ConfigError(f"{shown} cannot be saved: {error}") from None
    return value


def _checked_key(key: Any, shown: str) -> Any:
    """Return a key of a dict that can be packed and compares equal afterwards."""
    try:
        is_found = bool(unpack_object(pack_object({key: None})) == {key: None})
    except (ConfigError, WireError) as error:
        raise ConfigError(
            f"{shown} has the key {reprlib.repr(key)}, which cannot be saved: {error}"
        ) from None
    if not is_found:
        raise ConfigError(
            f"{shown} has the key {reprlib.repr(key)}, which differs after a save: use a text or "
            "an integer"
        )
    return key


def _require_own(variable: Variable, shown: str) -> None:
    """Raise ConfigError if a variable's value needs the copies of other replicas."""
    if variable.synchronization is not VariableSynchronization.ON_READ:
        return
    is_first = variable.strategy.communicator.rank == 0
    if variable.aggregation is VariableAggregation.ONLY_FIRST_REPLICA and is_first:
        return
    raise ConfigError(
        f"{shown} is the ON_READ variable {variable.name!r} ({variable.aggregation.name}), whose "
        "value combines the copies of all replicas, and sv.save uses only this one: pass "
        f"{variable.name}.local_value() for this replica's copy; or read its value "
        f"({variable.name}.numpy()) on every rank before, and pass that; or let all ranks save a "
        "Checkpoint"
    )


def _shown(place: Path) -> str:
    return "value" + "".join(f"[{key!r}]" for key in place)


def _names_of(arrays: Arrays) -> list[str]:
    """Return a unique tensor name for each array, from its path."""
    names: dict[str, None] = {}
    for place in arrays:
        name = plain = "/".join(map(str, place)) or "value"
        number = 1
        while name in names or name == "__metadata__":
            number += 1
            name = f"{plain}#{number}"
        names[name] = None
    return list(names)


def _read(descriptor: int, start: int, nbytes: int, where: str) -> NDArray[np.uint8]:
    data = np.empty(nbytes, np.uint8)
    read_into(descriptor, data.data, start, where)
    return data


def _array(
    data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...], tensor: Tensor | None = None
) -> NDArray[Any]:
    expected = CODES[dtype], stored_shape(dtype, shape)
    if tensor is not None and (tensor.dtype, tensor.shape) != expected:
        raise ValueError(f"tensor {tensor.name!r:.80} is not {dtype}{list(shape)}")
    array: NDArray[Any] = data.view(dtype_from_index(DTYPE_NAMES.index(dtype)))
    return array.reshape(shape)


def _with_arrays(value: Any, place: Path, arrays: Arrays) -> Any:
    if place in arrays:
        return arrays[place]
    if type(value) is dict:
        return {key: _with_arrays(item, (*place, key), arrays) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(
            _with_arrays(item, (*place, index), arrays) for index, item in enumerate(value)
        )
    return value
