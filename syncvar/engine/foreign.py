"""Links that another user has put on a path: what is written must not go where somebody else leads it."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["refuse_foreign_links"]


def refuse_foreign_links(path: str) -> None:
    """Refuse a path of which some part is a symbolic link of a user other than this one and root.

    In a folder where everybody may write, such as /tmp, anybody can lay a link where a file of ours is going to be made.

    Raises:
        PermissionError: There is one; `filename` tells which.
    """
    at = os.path.abspath(path)
    while True:
        try:
            about = os.lstat(at)
        except FileNotFoundError:
            pass
        else:
            if stat.S_ISLNK(about.st_mode) and about.st_uid not in (0, os.geteuid()):
                raise PermissionError(errno.EPERM, f"it is a link that user {about.st_uid} has made, and is not followed", at)
        above = os.path.dirname(at)
        if above == at:
            return
        at = above
