"""Texts on how to install this host's syncvar on another host: all hosts need the same one."""

from __future__ import annotations

import json
import shlex
from typing import Any
from urllib.parse import unquote, urlsplit

import syncvar


def describe_installation(python: str, host: str) -> str:
    """Return how to install the syncvar of this host for an interpreter of another one."""
    return remedy(python, host, _origin())


def remedy(python: str, host: str, origin: dict[str, Any]) -> str:
    """Return the advice for a package from a given origin.

    `origin` is pip's direct_url.json, or empty.

    Example:
        >>> words = remedy("python3", "n1", {"url": "file:///opt/syncvar", "dir_info": {}})
        >>> words.removeprefix(f"install syncvar {syncvar.__version__} as on this host: ")
        'copy /opt/syncvar to n1 and run there: python3 -m pip install /opt/syncvar'
    """
    begin = f"install syncvar {syncvar.__version__} as on this host: "
    url = str(origin.get("url", ""))
    source = origin.get("vcs_info")
    if source:
        place = f"{source['vcs']}+{url}@{source['commit_id']}"
        return f"{begin}run on {host}: {python} -m pip install {shlex.quote(place)}"
    if url.startswith("file:"):
        path = shlex.quote(unquote(urlsplit(url).path))
        return f"{begin}copy {path} to {host} and run there: {python} -m pip install {path}"
    return f"{begin}copy its folder or wheel to {host} and run there: {python} -m pip install PATH"


def _origin() -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, distribution  # slow, and seldom needed

    try:
        text = distribution("syncvar").read_text("direct_url.json")
        origin = json.loads(text or "{}")
    except (PackageNotFoundError, OSError, ValueError):
        return {}
    return origin if isinstance(origin, dict) else {}
