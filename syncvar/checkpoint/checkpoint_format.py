"""The format of a checkpoint: names of its files, safetensors headers, and the manifest. Pure.

A job opens and removes no file whose name has another form.

A shard is a safetensors file: 8 bytes (length of the header, little endian), the header (JSON), and
the tensors side by side. Not every reader knows complex numbers: they are stored as real ones with
a last axis of 2. The presence of the manifest is the commit. It lists every shard and, for each
entry, the location and digest of its pieces. Names in it are compared, never opened: identity and
rank give the file name of a shard.

Source: the format's description, github.com/huggingface/safetensors.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from syncvar.core.errors import CheckpointError, ConfigError, Corrupt

HEADER_BYTES_MAX = 16 << 20
_NDIM_MAX = 65
_PREFIX = 8
CODES = {
    "bool": "BOOL",
    "int8": "I8",
    "int16": "I16",
    "int32": "I32",
    "int64": "I64",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "complex64": "F32",
    "complex128": "F64",
}
# The number in a code is its bits; BOOL has eight.
_CODE_BYTES = {code: int(re.sub("[A-Z]", "", code) or 8) // 8 for code in CODES.values()}
FORMAT = "syncvar.checkpoint"
VERSION = 1
MANIFEST_BYTES_MAX = 64 << 20
DIGEST_BYTES = 16
KINDS = ("variable", "generator", "state", "value")
_REPLICAS_MAX = 1 << 20
_HEX = re.compile(r"[0-9a-f]+")
MANIFEST = "manifest.json"
LOCK = "lock.json"
_SHARD = re.compile(r"shard-([0-9a-f]{16})-(\d{5,7})-of-(\d{5,7})\.safetensors")
_TEMPORARY = re.compile(r"(?P<name>.+)\.tmp-[0-9a-f]{16}")
_STEP = re.compile(r"step-(\d{10,19})")
_STEP_MAX = 10**19 - 1


class Tensor(NamedTuple):
    """One tensor of a file."""

    name: str  # its key
    dtype: str  # code of the format
    shape: tuple[int, ...]  # shape of the stored numbers
    start: int  # first byte, counted from the end of the header
    stop: int  # byte after the last


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element of a NumPy dtype."""
    return _CODE_BYTES[CODES[dtype]] * (2 if dtype.startswith("complex") else 1)


def stored_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape under which an array is stored."""
    return (*shape, 2) if dtype.startswith("complex") else shape


def header_bytes(
    arrays: list[tuple[str, str, tuple[int, ...]]], metadata: dict[str, str]
) -> tuple[bytes, list[Tensor]]:
    """Return the header of a file and its tensors, in the order of `arrays`."""
    tensors, end = [], 0
    for name, dtype, shape in arrays:
        start, end = end, end + math.prod(shape) * itemsize_of(dtype)
        tensors.append(Tensor(name, CODES[dtype], stored_shape(dtype, shape), start, end))
    head: dict[str, Any] = {"__metadata__": metadata}
    head |= {
        t.name: {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start, t.stop]}
        for t in tensors
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_BYTES_MAX:
        raise CheckpointError(
            f"a shard's header takes {len(text)} bytes, more than {HEADER_BYTES_MAX}: save fewer "
            f"variables"
        )
    return len(text).to_bytes(_PREFIX, "little") + text, tensors


def header_length(prefix: bytes, file_nbytes: int) -> int:
    """Return the length of prefix and header."""
    length = int.from_bytes(prefix, "little")
    if len(prefix) != _PREFIX or length > min(HEADER_BYTES_MAX, file_nbytes - _PREFIX):
        raise CheckpointError(f"its header claims {length} bytes of a file of {file_nbytes}")
    return _PREFIX + length


def parse_header(data: bytes, file_nbytes: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors and the metadata of a file."""
    head = strict_json(data[_PREFIX:], "the header")
    metadata = head.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(type(text) is not str for text in metadata.values()):
        raise CheckpointError("the header's metadata are not texts")
    tensors = {name: _tensor(name, fields) for name, fields in head.items()}
    end = 0
    for tensor in sorted(tensors.values(), key=lambda one: (one.start, one.stop)):
        if tensor.start != end:
            raise CheckpointError(
                f"tensor {tensor.name!r} begins at {tensor.start}, not at {end}: a hole or an "
                "overlap"
            )
        end = tensor.stop
    end += len(data)
    if end != file_nbytes:
        raise CheckpointError(f"the tensors end at byte {end} of a file of {file_nbytes}")
    return tensors, metadata


def _tensor(name: str, fields: Any) -> Tensor:
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"tensor {name!r:.80} has not dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    are_lists = isinstance(shape, list) and isinstance(offsets, list)
    sizes_are_right = are_lists and len(shape) <= _NDIM_MAX and len(offsets) == 2
    if sizes_are_right:
        sizes_are_right = all(type(one) is int and 0 <= one < 1 << 62 for one in shape + offsets)
    if not isinstance(dtype, str) or dtype not in _CODE_BYTES or not sizes_are_right:
        raise CheckpointError(f"tensor {name!r:.80} has a wrong dtype, shape or offsets")
    start, stop = offsets
    if stop - start != math.prod(shape) * _CODE_BYTES[dtype]:
        raise CheckpointError(
            f"tensor {name!r:.80} of shape {shape} and dtype {dtype} does not take {stop - start} "
            f"bytes"
        )
    return Tensor(name, dtype, tuple(shape), start, stop)


def strict_json(data: bytes, name: str) -> dict[str, Any]:
    """Parse a JSON object; reject duplicate keys, NaN and infinities."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise CheckpointError(f"{name} has a key twice")
        return found

    def refuse(number: str) -> Any:
        raise CheckpointError(f"{name} has the number {number}")

    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{name} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{name} is not a JSON object")
    return value


def checked_path(path: Any, instead: str = "checkpoint.save('folder/name')") -> str:
    """Return a path as a str; raise ConfigError, which suggests `instead`, if it is not one."""
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"path must be a text or a Path, not {path!r:.80}: write {instead}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise ConfigError(f"path must be a text, not empty and without NUL, not {text!r:.80}")
    return text


def shard_name(identity: str, rank: int, count: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"shard-{identity}-{rank:05d}-of-{count:05d}.safetensors"


def is_shard(name: str, identity: str | None = None) -> bool:
    """Return whether a name is that of a shard (of one checkpoint, with `identity`)."""
    found = _SHARD.fullmatch(name)
    return found is not None and (identity is None or found[1] == identity)


def temporary_name(name: str, nonce: str) -> str:
    """Return the name of a file until it is renamed."""
    return f"{name}.tmp-{nonce}"


def is_left_over(name: str, identity: str | None) -> bool:
    """Return whether a file belongs to an unfinished save or to an older checkpoint."""
    temporary = _TEMPORARY.fullmatch(name)
    if temporary is not None:
        return temporary["name"] == MANIFEST or is_shard(temporary["name"])
    return is_shard(name) and (identity is None or not is_shard(name, identity))


def step_name(step: int) -> str:
    """Return the folder name of a step, ordered like the steps; raise ConfigError otherwise."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= _STEP_MAX:
        raise ConfigError(
            f"step must be an integer of at least 0, not {step!r}: write manager.save(step=100)"
        )
    return f"step-{step:010d}"


def step_of(name: str) -> int | None:
    """Return the step of a folder name, or None."""
    found = _STEP.fullmatch(name)
    return None if found is None else int(found[1])


def digest_of(data: Any) -> str:
    """Return the digest of bytes in hexadecimal."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


class Piece(NamedTuple):
    """Elements start to stop (in C order) of a value: the tensor of its key in that shard."""

    shard: int
    start: int
    stop: int
    digest: str


class Stored(NamedTuple):
    """An array in the files."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def words(self) -> str:
        """Dtype and shape for texts."""
        return f"{self.dtype}{list(self.shape)}"


class Label(NamedTuple):
    """Name of a checkpoint in its run."""

    step: int | None = None  # step of the program, or None
    metric: float | None = None  # quality, or None
    number: int = 0  # sequence number of the save in a manager's directory; 0 outside one


class ShardFile(NamedTuple):
    """Length and header digest of one file."""

    nbytes: int
    header_digest: str


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """The data saved under one key: the shared value, or the own value of each replica."""

    kind: str  # "variable", "generator", "state" or "value"
    mode: str  # synchronization and aggregation of a variable; "" otherwise
    replicas: int  # number of replicas at the save
    value: Stored | None = None
    copies: dict[int, Stored] = field(default_factory=dict)

    @property
    def stored(self) -> list[Stored]:
        """All its arrays."""
        return [*([] if self.value is None else [self.value]), *self.copies.values()]

    def choose(
        self, key: str, replica: int, replicas: int, policy: str, *, own: bool
    ) -> Stored | None:
        """Return the array that a replica restores, None if it keeps its value."""
        if self.value is not None:
            return self.value
        if not own:
            if 0 not in self.copies:
                raise CheckpointError(
                    f"{key!r}: the checkpoint has no copy of replica 0, which all would restore"
                )
            return self.copies[0]
        if policy == "error" and replicas != self.replicas:
            raise CheckpointError(
                f"{key!r} was saved by {self.replicas} replicas, each its own value, and is "
                f"restored by {replicas}; pass restore_policy='same_rank_or_initial' or 'cycle'"
            )
        return self.copies.get(replica % self.replicas if policy == "cycle" else replica)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint: shard files by rank, and entries by key."""

    identity: str  # 16 hexadecimal digits, new for every save
    ranks: int  # number of ranks that saved it
    label: Label = field(default_factory=Label)
    shards: dict[int, ShardFile] = field(default_factory=dict)
    entries: dict[str, ManifestEntry] = field(default_factory=dict)
    # rank -> number of its pushes that the server-side variables include
    pushes: dict[int, int] = field(default_factory=dict)

    def shard_file(self, rank: int) -> str:
        """Return the file name of a rank's shard."""
        return shard_name(self.identity, rank, self.ranks)

    def to_bytes(self) -> bytes:
        """Return the content of the file."""
        body = {
            "format": FORMAT,
            "version": VERSION,
            "identity": self.identity,
            "world_size": self.ranks,
            "step": self.label.step,
            "metric": None if self.label.metric is None else repr(float(self.label.metric)),
            "shards": {
                str(rank): {"file": self.shard_file(rank), **one._asdict()}
                for rank, one in self.shards.items()
            },
            "entries": {key: _entry_body(entry) for key, entry in self.entries.items()},
        }
        if self.label.number:
            body["save_number"] = self.label.number
        if self.pushes:
            body["pushes"] = {str(rank): count for rank, count in self.pushes.items()}
        body["digest"] = _own_digest(body)
        return json.dumps(body, sort_keys=True, indent=1, allow_nan=False).encode() + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Parse the content of a file."""
        body = strict_json(data, "the manifest")
        if body.get("format") != FORMAT:
            raise CheckpointError(f"the manifest is not of the format {FORMAT}")
        if body.get("version") != VERSION:
            raise CheckpointError(
                f"the manifest has version {body.get('version')!r:.20}, and this syncvar reads "
                f"version {VERSION}: update syncvar"
            )
        expected = body.pop("digest", None)
        actual = _own_digest(body)
        if expected != actual:
            raise Corrupt("the manifest", str(expected)[:64], actual)
        try:
            manifest = cls(
                _text(body["identity"], 16),
                _number(body["world_size"], 1, _REPLICAS_MAX),
                _label(body),
                {
                    _index(rank): _shard(one)
                    for rank, one in _require_type(body["shards"], dict).items()
                },
                {key: _entry(one) for key, one in _require_type(body["entries"], dict).items()},
                {
                    _index(rank): _number(count, 0, 1 << 62)
                    for rank, count in _require_type(body.get("pushes", {}), dict).items()
                },
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"the manifest is not of the right form: {type(error).__name__}: {str(error)[:200]}"
            ) from None
        manifest.check()
        return manifest

    def check(self) -> None:
        """Check that the parts fit together, before anything is opened or allocated."""
        if any(rank >= self.ranks for rank in self.shards):
            raise CheckpointError(f"the manifest has shards of more than {self.ranks} ranks")
        for key, entry in self.entries.items():
            if (entry.value is None) == (not entry.copies):
                raise CheckpointError(f"entry {key!r:.80} must have a value or copies")
            if any(number >= entry.replicas for number in entry.copies):
                raise CheckpointError(
                    f"entry {key!r:.80} has copies of more than {entry.replicas} replicas"
                )
            for stored in entry.stored:
                _check_stored(key, stored, self.shards)


def _check_stored(key: str, stored: Stored, shards: dict[int, ShardFile]) -> None:
    count, end = math.prod(stored.shape), 0
    for piece in stored.pieces:
        if piece.start != end or piece.stop <= end:
            raise CheckpointError(
                f"the pieces of entry {key!r:.80} have a hole or an overlap at element {end}"
            )
        end = piece.stop
        shard = shards.get(piece.shard)
        if shard is None or (piece.stop - piece.start) * itemsize_of(stored.dtype) > shard.nbytes:
            raise CheckpointError(
                f"a piece of entry {key!r:.80} does not fit into the shard of rank {piece.shard}"
            )
    if end != count:
        raise CheckpointError(f"the pieces of entry {key!r:.80} end at element {end} of {count}")


def _own_digest(body: dict[str, Any]) -> str:
    return digest_of(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())


def _entry_body(entry: ManifestEntry) -> dict[str, Any]:
    body: dict[str, Any] = {"kind": entry.kind, "mode": entry.mode, "replicas": entry.replicas}
    if entry.value is not None:
        body["value"] = _stored_body(entry.value)
    if entry.copies:
        body["copies"] = {str(number): _stored_body(one) for number, one in entry.copies.items()}
    return body


def _stored_body(stored: Stored) -> dict[str, Any]:
    return {
        "dtype": stored.dtype,
        "shape": list(stored.shape),
        "pieces": [list(piece) for piece in stored.pieces],
    }


def _entry(body: Any) -> ManifestEntry:
    kind = _require_type(body["kind"], str)
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r:.40}")
    replicas = _number(body["replicas"], 1, _REPLICAS_MAX)
    value = _stored(body["value"]) if "value" in body else None
    copies = {
        _index(key): _stored(one)
        for key, one in _require_type(body.get("copies", {}), dict).items()
    }
    return ManifestEntry(kind, _require_type(body["mode"], str), replicas, value, copies)


def _label(body: dict[str, Any]) -> Label:
    step, metric = body["step"], body["metric"]
    return Label(
        None if step is None else _number(step, 0, 10**19),
        None if metric is None else float(_require_type(metric, str)),
        _number(body.get("save_number", 0), 0, 1 << 62),
    )


def _stored(body: Any) -> Stored:
    dtype = _require_type(body["dtype"], str)
    if dtype not in CODES:
        raise ValueError(f"unknown dtype {dtype!r:.40}")
    shape = tuple(_number(length, 0, 1 << 62) for length in _require_type(body["shape"], list))
    if len(shape) > 64 or math.prod(shape) > 1 << 62:
        raise ValueError(f"impossible shape {shape!r:.80}")
    return Stored(dtype, shape, tuple(_piece(one) for one in _require_type(body["pieces"], list)))


def _piece(body: Any) -> Piece:
    shard, start, stop, digest = body
    return Piece(
        _number(shard, 0, _REPLICAS_MAX),
        _number(start, 0, 1 << 62),
        _number(stop, 0, 1 << 62),
        _text(digest, 2 * DIGEST_BYTES),
    )


def _shard(body: Any) -> ShardFile:
    return ShardFile(
        _number(body["nbytes"], 8, 1 << 62), _text(body["header_digest"], 2 * DIGEST_BYTES)
    )


def _require_type(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60} is not of type {kind.__name__}")
    return value


def _number(value: Any, low: int, high: int) -> int:
    number: int = _require_type(value, int)
    if not low <= number <= high:
        raise ValueError(f"{number!r:.40} is out of range")
    return number


def _index(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 7 or str(int(text)) != text:
        raise ValueError(f"{text!r:.40} is not a rank")
    return int(text)


def _text(value: Any, length: int) -> str:
    text: str = _require_type(value, str)
    if len(text) != length or not _HEX.fullmatch(text):
        raise ValueError(f"{text!r:.80} is not {length} hexadecimal digits")
    return text
