"""sv.shared_array: one memory on all ranks of a host, without locks; refused where the ranks share none."""

import gc

import numpy as np
import pytest

import syncvar as sv
from syncvar.bootstrap.process import current
from syncvar.shm.segment_file import SegmentId
from syncvar.testing import run_ranks
from tests.support.harness import caught


def everywhere(size, program, **world):
    results = run_ranks(size, program, **({"shared": True} | world))
    for one in results:
        if isinstance(one, BaseException):
            raise one
    return results


def place(array):
    return array.__array_interface__["data"][0] - current().shm.address


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(5, "float64"), ((3, 2), "int16"), ((), "float32"), ((0, 4), "bool"), (9, np.complex128)],
)
def test_all_ranks_see_one_array_of_zeros(shape, dtype):
    def program():
        made = sv.shared_array(shape, dtype)
        begin = made.tolist()
        sv.barrier()
        if sv.rank() == 1:
            made[...] = 1
        sv.barrier()
        return begin, made.tolist(), made.shape, made.dtype, made.flags.writeable, place(made) % 64

    wanted = np.zeros(shape, dtype)
    one = (wanted.tolist(), np.ones(shape, dtype).tolist(), wanted.shape, wanted.dtype, True, 0)
    assert everywhere(3, program) == [one] * 3


def test_memory_that_was_used_before_reads_as_zeros():
    def program():
        found = []
        for _ in range(3):
            made = sv.shared_array(1000)
            found.append((place(made), float(made.sum())))
            sv.barrier()
            made[sv.rank() :: 2] = 7.0
            sv.barrier()
            del made
            gc.collect()
            sv.barrier()
        return found

    for found in everywhere(2, program):
        assert [total for _, total in found] == [0.0] * 3
        assert (
            len({where for where, _ in found}) == 1
        )  # all had let go of it: the memory is taken again


def test_memory_of_which_one_rank_has_a_view_is_given_to_nobody():
    def program():
        first = sv.shared_array(1000)
        held = first[:10] if sv.rank() == 1 else None
        kept = place(first)
        del first
        gc.collect()
        sv.barrier()
        second = sv.shared_array(1000)
        second[...] = 3.0
        sv.barrier()
        return kept == place(second), None if held is None else float(held.sum())

    assert everywhere(2, program) == [(False, None), (False, 0.0)]


def test_a_group_of_one_host_has_its_own():
    def program():
        pairs = [sv.new_group([0, 1]), sv.new_group([2, 3])]
        mine = pairs[sv.host_index()]
        made = sv.shared_array(1, group=mine)
        made[0] = 10 + sv.host_index()
        sv.barrier()
        other = caught(lambda: sv.shared_array(1, group=pairs[1 - sv.host_index()]))
        return made.tolist(), type(other), str(caught(lambda: sv.shared_array(4)))

    results = everywhere(4, program, hosts=2)
    assert [one for one, _, _ in results] == [[10.0], [10.0], [11.0], [11.0]]
    for _, other, refused in results:
        assert other is sv.UsageError
        assert (
            "the ranks [0, 1, 2, 3] are on 2 hosts, which share no memory: pass a group of the ranks of one host"
            in refused
        )


def test_a_rank_that_has_mapped_another_segment_refuses_the_reference():
    def program():
        shm = current().shm
        own = shm.segment
        if sv.rank() == 1:
            shm.segment = SegmentId(3, 0, 255)  # as if this rank were on another host
        refused = caught(lambda: sv.shared_array(4))
        shm.segment = own
        return type(refused), str(refused)

    (fine, _), (refused, text) = everywhere(2, program)
    assert fine is type(None)
    assert refused is sv.InternalError
    assert "this process has mapped segment 00000000000000ff (host 3, generation 0)" in text


def test_ranks_without_an_shm_are_told_why():
    def program():
        refused = caught(lambda: sv.shared_array(4))
        return (
            type(refused),
            "share no memory: ranks of an in-process world have links between them" in str(refused),
            int(sv.all_reduce(1)),
        )

    assert everywhere(2, program, shared=False) == [(sv.ConfigError, True, 2)] * 2


def test_one_rank_has_an_ordinary_array():
    made = sv.shared_array((2, 2), "int32")
    made += 1
    assert (made.tolist(), made.dtype) == ([[1, 1], [1, 1]], np.int32)


def test_ranks_that_ask_for_different_arrays_are_all_told():
    def program():
        unlike = type(caught(lambda: sv.shared_array(4 + sv.rank())))
        kinds = type(caught(lambda: sv.shared_array(4, "int32" if sv.rank() else "float32")))
        one_bad = type(caught(lambda: sv.shared_array(-1 if sv.rank() == 0 else 3)))
        left = current().extras["memory_in_common"]
        return unlike, kinds, one_bad, len(left), sv.shared_array(2).tolist()

    mismatch = sv.MismatchError
    zeros = [0.0, 0.0]
    assert everywhere(2, program) == [
        (mismatch, mismatch, sv.ConfigError, 0, zeros),
        (mismatch, mismatch, mismatch, 0, zeros),
    ]


def test_no_room_is_the_same_error_on_every_rank_and_the_group_goes_on():
    def program():
        full = caught(lambda: sv.shared_array(1 << 50))
        return type(full), "shared memory" in str(full), int(sv.all_reduce(1))

    assert everywhere(2, program) == [(sv.SharedMemoryFull, True, 2)] * 2
