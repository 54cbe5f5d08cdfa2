"""Names of files and folders of checkpoints. No file of another name is ever opened or removed."""

from __future__ import annotations

import os
import re
from typing import Any

from syncvar.core.errors import ConfigError

MANIFEST = "manifest.json"
LOCK = "lock.json"
_SHARD = re.compile(r"shard-([0-9a-f]{16})-(\d{5,7})-of-(\d{5,7})\.safetensors")
_TEMPORARY = re.compile(r"(?P<name>.+)\.tmp-[0-9a-f]{16}")
_STEP = re.compile(r"step-(\d{10,19})")
_STEP_MAX = 10**19 - 1


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
