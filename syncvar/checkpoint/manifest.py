"""The manifest of a checkpoint as data, its bytes, and the checks on untrusted bytes. Pure.

Its presence is the commit. It lists every shard and, for each entry, the location and digest of its
pieces. Names in it are compared, never opened: identity and rank give the file name of a shard.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from syncvar.checkpoint.file_names import shard_name
from syncvar.checkpoint.safetensors_header import CODES, itemsize_of, strict_json
from syncvar.core.errors import CheckpointError, Corrupt

FORMAT = "syncvar.checkpoint"
VERSION = 1
MANIFEST_BYTES_MAX = 64 << 20
DIGEST_BYTES = 16
KINDS = ("variable", "generator", "state", "value")
_REPLICAS_MAX = 1 << 20
_HEX = re.compile(r"[0-9a-f]+")


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
    """Name of a checkpoint in its run.

    Args:
        step: Step of the program, or None.
        metric: Quality, or None.
        number: Sequence number of the save in a manager's directory; 0 outside one.
    """

    step: int | None = None
    metric: float | None = None
    number: int = 0


class ShardFile(NamedTuple):
    """Length and header digest of one file."""

    nbytes: int
    header_digest: str


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """The data saved under one key.

    Args:
        kind: "variable", "generator", "state" or "value".
        mode: Synchronization and aggregation of a variable; "" otherwise.
        replicas: Number of replicas at the save.
        value: The shared value, or None.
        copies: Replica -> its own value, if there is no shared one.
    """

    kind: str
    mode: str
    replicas: int
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
    """A complete checkpoint.

    Args:
        identity: 16 hexadecimal digits, new for every save.
        ranks: Number of ranks that saved it.
        label: Step, metric and number.
        shards: Shard files by rank.
        entries: Entries by key.
        pushes: Rank -> number of its pushes that the server-side variables include.
    """

    identity: str
    ranks: int
    label: Label = field(default_factory=Label)
    shards: dict[int, ShardFile] = field(default_factory=dict)
    entries: dict[str, ManifestEntry] = field(default_factory=dict)
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
                {_index(rank): _shard(one) for rank, one in _is(body["shards"], dict).items()},
                {key: _entry(one) for key, one in _is(body["entries"], dict).items()},
                {
                    _index(rank): _number(count, 0, 1 << 62)
                    for rank, count in _is(body.get("pushes", {}), dict).items()
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
    kind = _is(body["kind"], str)
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r:.40}")
    replicas = _number(body["replicas"], 1, _REPLICAS_MAX)
    value = _stored(body["value"]) if "value" in body else None
    copies = {
        _index(number): _stored(one) for number, one in _is(body.get("copies", {}), dict).items()
    }
    return ManifestEntry(kind, _is(body["mode"], str), replicas, value, copies)


def _label(body: dict[str, Any]) -> Label:
    step, metric = body["step"], body["metric"]
    return Label(
        None if step is None else _number(step, 0, 10**19),
        None if metric is None else float(_is(metric, str)),
        _number(body.get("save_number", 0), 0, 1 << 62),
    )


def _stored(body: Any) -> Stored:
    dtype = _is(body["dtype"], str)
    if dtype not in CODES:
        raise ValueError(f"unknown dtype {dtype!r:.40}")
    shape = tuple(_number(length, 0, 1 << 62) for length in _is(body["shape"], list))
    if len(shape) > 64 or math.prod(shape) > 1 << 62:
        raise ValueError(f"impossible shape {shape!r:.80}")
    return Stored(dtype, shape, tuple(_piece(one) for one in _is(body["pieces"], list)))


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


def _is(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{value!r:.60} is not of type {kind.__name__}")
    return value


def _number(value: Any, low: int, high: int) -> int:
    number: int = _is(value, int)
    if not low <= number <= high:
        raise ValueError(f"{number!r:.40} is out of range")
    return number


def _index(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 7 or str(int(text)) != text:
        raise ValueError(f"{text!r:.40} is not a rank")
    return int(text)


def _text(value: Any, length: int) -> str:
    text: str = _is(value, str)
    if len(text) != length or not _HEX.fullmatch(text):
        raise ValueError(f"{text!r:.80} is not {length} hexadecimal digits")
    return text
