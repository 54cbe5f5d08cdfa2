"""What replicas make of their headers for a step: the whole table."""

from itertools import product

import numpy as np
import pytest

from syncvar.protocol.fixed_records import pack_record, unpack_record
from syncvar.strategies.distributed_dataset import BatchHeader, decide_step, is_unanimous

BATCH, LONGER, OTHER = (
    BatchHeader(True, rows, 0, 3, kind) for rows, kind in ((4, 11), (5, 11), (4, 12))
)
ENDED, FORGOT, NEVER = (BatchHeader(False, 0, 0, 3, kind) for kind in (11, 12, 0))
AHEAD, NEXT_EPOCH = BatchHeader(True, 4, 0, 4, 11), BatchHeader(True, 4, 1, 3, 11)
ALL = [BATCH, LONGER, OTHER, ENDED, FORGOT, NEVER, AHEAD, NEXT_EPOCH]


@pytest.mark.parametrize("is_global", [False, True])
def test_every_triple_of_offers(is_global):
    for headers in product(ALL, repeat=3):
        made = decide_step(headers, is_global=is_global)
        live = [one for one in headers if one.has_batch]
        agree = (
            len({(one.epoch, one.position) for one in headers}) == 1
            and len({one.kind for one in live}) <= 1
        )
        if is_global and live:
            agree = agree and len(live) == 3 and len({one.rows for one in headers}) == 1
        assert bool(made.disagreement) != agree, headers
        assert made.is_over == (agree and not live), headers
        needs = agree and live and any(one.kind != live[0].kind for one in headers)
        assert (made.describer is not None) == bool(needs), headers
        if made.describer is not None:
            assert headers[made.describer].has_batch


def test_who_tells_the_kind_of_a_batch():
    assert decide_step([ENDED, BATCH], is_global=False).describer is None
    assert decide_step([NEVER, ENDED, BATCH, BATCH], is_global=False).describer == 2
    assert decide_step([BATCH, FORGOT], is_global=False).describer == 0


def test_contents_count_for_global_batches_only():
    one, other = BATCH._replace(content=5), BATCH._replace(content=6)
    assert decide_step([one, other], is_global=True).differs
    assert not decide_step([one, one], is_global=True).differs
    assert not decide_step([one, other], is_global=False).differs


@pytest.mark.parametrize("is_global", [False, True])
def test_offers_are_unanimous_where_nothing_has_to_be_settled(is_global):
    for headers in product([*ALL, BATCH._replace(content=9)], repeat=2):
        largest = np.maximum.reduce([header.sides(is_global=is_global) for header in headers])
        same = [header._replace(rows=0) if not is_global else header for header in headers]
        assert is_unanimous(largest) == (same[0] == same[1])
        if is_unanimous(largest):
            made = decide_step(headers, is_global=is_global)
            assert not made.disagreement
            assert made.describer is None
            assert not made.differs
            assert made.is_over == (not headers[0].has_batch)


def test_an_offer_travels_as_a_record():
    for header in (
        *ALL,
        BatchHeader(True, (1 << 63) + 5, 9, 1 << 40, (1 << 64) - 1, (1 << 64) - 2),
    ):
        assert BatchHeader.from_record(unpack_record(pack_record(header.record()))) == header
