"""The digits example in one process: equal bits for 1, 2 and 4 workers, and a clear refusal of 3."""

import pytest

import syncvar as sv
from syncvar.testing import run_ranks

pytest.importorskip("sklearn")


def test_equal_bits_for_1_2_and_4_workers():
    from syncvar.examples import digits

    data = digits.load()

    def program():
        trainer = digits.Trainer(data, sv.MirroredStrategy(reproducible=True))
        loss, accuracy = trainer.epoch(range_of(data))
        return trainer.digest(), loss, accuracy, trainer.test_accuracy()

    def range_of(data):
        import numpy as np

        return np.arange(len(data.train_labels))

    digests = set()
    for workers in (1, 2, 4):
        results = run_ranks(workers, program, timeout_s=60)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        digests |= {result[0] for result in results}
        assert results[0][3] > 0.5
    assert len(digests) == 1


def test_three_workers_are_refused():
    from syncvar.examples import digits

    with pytest.raises(sv.ConfigError, match="--workers 1, 2 or 4"):
        digits.own_shards(3, 0)
    assert [list(digits.own_shards(2, rank)) for rank in (0, 1)] == [[0, 1], [2, 3]]
