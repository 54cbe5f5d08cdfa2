"""A checkpoint that another job saves anew while several ranks read it: all restore the same one, or nothing."""

import shutil
import threading

import numpy as np
import pytest

import syncvar as sv
from syncvar.checkpoint import restore
from syncvar.checkpoint.checkpoint_format import MANIFEST
from syncvar.testing import run_ranks

RANKS = 3


def everywhere(fn):
    results = run_ranks(RANKS, fn, timeout_s=120)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


@pytest.fixture
def folder(tmp_path):
    """Return the path of a checkpoint of 0.0, and a function that puts one of another number there, as a save does."""

    def save(name, value):
        everywhere(
            lambda: sv.Checkpoint(v=sv.Variable(np.full(50, value))).save(tmp_path / name) and None
        )
        return tmp_path / name

    path = save("0.0", 0.0)

    def replace(value):
        made = save(str(value), value)
        for file in made.iterdir():
            if file.name != MANIFEST:
                shutil.copy(file, path)
        shutil.copy(made / MANIFEST, path / "next")
        (path / "next").replace(path / MANIFEST)

    return path, replace


def meanwhile(monkeypatch, replace):
    """Let rank 0 read, then `replace(number of the reading)`, then the other ranks read; give a list of all readings."""
    usual = restore.stage_leaves
    are_there = [threading.Event() for _ in range(20)]
    readings = [[] for _ in range(RANKS)]

    def stage(*arguments, **options):
        rank = sv.rank()
        number = len(readings[rank])
        readings[rank].append(number)
        if rank:
            assert are_there[number].wait(20)
        made = usual(*arguments, **options)
        if not rank:
            thread = threading.Thread(target=replace, args=(number,))  # of another world
            thread.start()
            thread.join(20)
            are_there[number].set()
        return made

    monkeypatch.setattr(restore, "stage_leaves", stage)
    return readings


def restored(path):
    def fn():
        v = sv.Variable(np.full(50, -1.0))
        try:
            sv.Checkpoint(v=v).restore(path(sv.rank()) if callable(path) else path)
        except sv.CheckpointError as error:
            return str(error), v.numpy().tolist()
        return None, v.numpy().tolist()

    return everywhere(fn)


def test_all_ranks_read_again(folder, monkeypatch):
    path, replace = folder
    readings = meanwhile(monkeypatch, lambda number: number < 2 and replace(number + 1.0))
    assert restored(path) == [(None, [2.0] * 50)] * RANKS
    assert [len(one) for one in readings] == [3] * RANKS


def test_they_give_up_where_it_is_replaced_each_time(folder, monkeypatch):
    path, replace = folder
    monkeypatch.setattr(restore, "_ROUNDS", 3)
    meanwhile(monkeypatch, lambda number: replace(number + 1.0))
    for message, value in restored(path):
        assert "times while the ranks read it" in message
        assert value == [-1.0] * 50


def test_folders_that_are_not_the_same_are_told_at_the_second_look(folder, monkeypatch, tmp_path):
    path, _ = folder
    shutil.copytree(path, tmp_path / "other")
    everywhere(lambda: sv.Checkpoint(v=sv.Variable(np.ones(50))).save(tmp_path / "other") and None)
    readings = meanwhile(monkeypatch, lambda number: None)
    for message, value in restored(lambda rank: tmp_path / "other" if rank == 1 else path):
        assert "see different checkpoints" in message
        assert value == [-1.0] * 50
    assert [len(one) for one in readings] == [2] * RANKS
