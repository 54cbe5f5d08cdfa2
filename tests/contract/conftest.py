"""Fixtures of the tests of one piece, or of ranks in one process."""

import os

import pytest


@pytest.fixture
def foreign_link(monkeypatch):
    """Return what makes a link that belongs to another user; who is not root takes the place of the other user himself."""

    def make(link, target):
        link.symlink_to(target)
        if os.geteuid() == 0:
            os.lchown(link, 65534, 65534)
        else:
            other = os.geteuid() + 1
            monkeypatch.setattr(os, "geteuid", lambda: other)

    return make
