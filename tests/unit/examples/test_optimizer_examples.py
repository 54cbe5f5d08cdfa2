"""The training examples in one process, each rank a thread: what they come to, and what they say when something is missing."""

import sys

import numpy as np
import pytest

import syncvar as sv
from syncvar.examples import (
    easgd,
    gossip,
    hogwild,
    jax_gradients,
    local_sgd,
    model_parallel,
    spirals,
    torch_gradients,
    torch_module,
)
from syncvar.testing import run_ranks


def everywhere(size, fn):
    results = run_ranks(size, fn, timeout_s=60)
    errors = [result for result in results if isinstance(result, BaseException)]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, sv.TransportError))
    return results


def test_local_sgd_averages_every_eighth_step():
    data = local_sgd.make_data()
    seldom = everywhere(3, lambda: local_sgd.train(data, 120, period=8))
    often = everywhere(3, lambda: local_sgd.train(data, 120, period=1))
    for outcomes in (seldom, often):
        assert len(set(outcomes)) == 1
        assert outcomes[0].loss < 1.2 * local_sgd.NOISE**2
    assert [seldom[0].averagings, often[0].averagings] == [15, 120]
    assert seldom[0].spread > often[0].spread > 0


def test_the_mean_of_the_workers_is_the_mean():
    def fn():
        v = sv.Variable([1.0 + sv.rank(), 0.0], synchronization="NONE")
        local_sgd.average([v])
        return v.local_value().tolist()

    assert everywhere(4, fn) == [[2.5, 0.0]] * 4


def test_the_spring_moves_both_ends():
    def fn():
        own = sv.Variable([4.0 * sv.rank()], synchronization="NONE")
        center = sv.Variable([1.0], aggregation="SUM")
        easgd.pull(own, center, 0.25)
        return own.local_value().item(), center.numpy().item()

    # equations 3 and 4 with alpha = 1/4: own - (own - 1) / 4, center + sum of (own - 1) / 4
    assert everywhere(2, fn) == [(0.25, 1.5), (3.25, 1.5)]


def test_the_center_of_easgd_is_better_than_its_workers():
    data = local_sgd.make_data()
    outcomes = everywhere(3, lambda: easgd.train(data, 160))
    assert len(set(outcomes)) == 1
    made = outcomes[0]
    assert made.center_loss < 1.1 * local_sgd.NOISE**2
    assert made.center_loss < made.worker_loss
    assert made.spread > 0
    with pytest.raises(sv.ConfigError, match="overshoots"):
        easgd.train(data, 1, beta=1.5)


def test_gossip_keeps_the_mean_and_brings_all_together():
    data = local_sgd.make_data()

    def fn():
        rank, pairs = sv.rank(), np.random.default_rng(0)
        weights = np.arange(3.0) + 10 * rank
        partners = []
        for _ in range(40):
            partner = gossip.partner_of(rank, pairs.permutation(sv.world_size()))
            partners.append(partner)
            if partner is not None:
                weights = gossip.average_with(partner, weights)
        return weights, partners

    results = everywhere(5, fn)
    for number in range(40):
        met = [partners[number] for _, partners in results]
        assert met.count(None) == 1
        assert all(met[partner] == rank for rank, partner in enumerate(met) if partner is not None)
    assert np.allclose(
        np.mean([weights for weights, _ in results], axis=0), [20.0, 21.0, 22.0], rtol=1e-12
    )
    assert max(float(np.abs(weights - [20.0, 21.0, 22.0]).max()) for weights, _ in results) < 0.05
    outcomes = everywhere(3, lambda: gossip.train(data, 120, look_every=60))
    assert len(set(outcomes)) == 1
    assert outcomes[0].loss < 1.2 * local_sgd.NOISE**2
    assert outcomes[0].spreads[0] > 100 * outcomes[0].spreads[1] > 1000 * outcomes[0].spreads[2]


def test_hogwild_learns_from_the_rows_of_all():
    rows = hogwild.make_rows()
    together = run_ranks(2, lambda: hogwild.train(rows, epochs=4), shared=True)
    assert together[0] == together[1]
    assert together[0].steps == 4 * hogwild.ROWS
    assert together[0].best <= together[0].loss < together[0].best + 0.01


@pytest.mark.parametrize("size", [2, 4])
def test_two_stages_over_ranks_have_the_losses_of_one_process(size):
    losses = everywhere(size, lambda: model_parallel.train(8))
    expected = model_parallel.one_process(8)
    assert expected[-1] < expected[0]
    for rank, made in enumerate(losses):
        np.testing.assert_allclose(made, expected if rank % 2 else np.zeros(8), rtol=1e-12)


def test_three_ranks_cannot_share_two_stages():
    with pytest.raises(sv.ConfigError, match="--workers 2 or 4"):
        everywhere(3, model_parallel.train)


@pytest.mark.parametrize(
    ("module", "example", "pip"),
    [
        ("torch", torch_module, "pip install torch"),
        ("torch", torch_gradients, "pip install torch"),
        ("jax", jax_gradients, "pip install jax"),
    ],
)
def test_a_missing_library_is_named_in_one_line(monkeypatch, module, example, pip):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(SystemExit) as ended:
        example.main()
    assert pip in str(ended.value)
    assert "\n" not in str(ended.value)


def numpy_gradients(weights, inputs, labels):
    """Gradients of the spirals' network by hand, in the place of a library's."""
    hidden = [inputs]
    for matrix, bias in zip(weights[:-2:2], weights[1:-2:2], strict=True):
        hidden.append(np.tanh(hidden[-1] @ matrix + bias))
    scores = hidden[-1] @ weights[-2] + weights[-1]
    likely = np.exp(scores - scores.max(axis=1, keepdims=True))
    likely /= likely.sum(axis=1, keepdims=True)
    rows = np.arange(len(labels))
    loss = float(-np.log(likely[rows, labels]).mean())
    likely[rows, labels] -= 1
    back, found = likely / len(labels), []
    for layer in (2, 1, 0):
        found = [hidden[layer].T @ back, back.sum(axis=0), *found]
        back = (back @ weights[2 * layer].T) * (1 - hidden[layer] ** 2)
    return loss, found


def test_spirals_come_to_the_same_with_even_and_uneven_parts(capsys):
    points = spirals.make_points(200)
    accuracy = lambda weights, inputs, labels: 0.5

    def fn():
        made = spirals.train(points, numpy_gradients, accuracy, 40)
        spirals.report(made, "hand")
        return made

    even, uneven = (
        everywhere(2, fn),
        everywhere(5, fn),
    )  # 96 rows over 5 workers: 20 and four times 19
    assert len({made.digest for made in even}) == len({made.digest for made in uneven}) == 1
    assert uneven[0].loss == pytest.approx(even[0].loss, rel=1e-3)
    assert even[0].loss < 0.6
    assert "workers=5" in capsys.readouterr().out


def test_report_refuses_workers_that_differ():
    def fn():
        with pytest.raises(SystemExit, match="weights differ"):
            spirals.report(spirals.Trained(0.0, 0.0, str(sv.rank())), "nothing")
        return True

    assert everywhere(2, fn) == [True, True]
