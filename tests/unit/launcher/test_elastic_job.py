"""The membership of an elastic job: messages of workers and news of their processes come on different paths."""

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from syncvar.protocol.control_messages import parse_message
from syncvar_launcher.job.elastic_job import ElasticJob
from syncvar_launcher.job.supervisor import LoseWorker


@pytest.fixture
def elastic():
    job = MagicMock(first_workers=range(2))
    job.options.ranks = SimpleNamespace(fewest=2, most=2)
    job.config.rendezvous_timeout_s = 60.0
    job.host_of.return_value = 0
    console = MagicMock()
    console.watch.now.return_value = 0.0
    store = MagicMock(enrollments=[], failure=None)
    return ElasticJob(job, console, store, MagicMock(), -1, MagicMock())


def enroll(elastic, *workers):
    message = {"kind": "enroll", "heard": -1, "holds": -1}
    elastic._store.enrollments = [(worker, message) for worker in workers]
    elastic.serve(1.0)


def assigned(elastic):
    sent = elastic._store.send_to_worker.call_args_list
    return [one.args[0] for one in sent if parse_message(one.args[1])["kind"] == "assignment"]


def test_an_enrollment_that_comes_before_the_news_of_the_start_counts(elastic):
    enroll(elastic, 0, 1)
    assert assigned(elastic) == []
    elastic.started(0, 2.0)
    elastic.started(1, 2.0)
    assert assigned(elastic) == [0, 1]


def test_an_early_enrollment_does_not_count_for_the_next_process(elastic):
    enroll(elastic, 0, 1)
    elastic.started(0, 2.0)
    elastic.restart(1, "restart 1 of 1")
    elastic.started(1, 2.0)
    assert assigned(elastic) == []
    enroll(elastic, 1)
    assert assigned(elastic) == [0, 1]


def test_only_the_loss_of_a_member_wakes_the_others(elastic):
    elastic.expect([2])
    for worker in range(3):
        elastic.started(worker, 0.0)
    enroll(elastic, 0, 1, 2)
    assert assigned(elastic) == [0, 1]
    elastic.lose(LoseWorker(2, "signal 9", -9, "lost", returns=False), 2.0)
    assert not elastic._workers.abort.called
    elastic.lose(LoseWorker(1, "signal 9", -9, "lost", returns=True), 2.0)
    elastic._workers.abort.assert_called_with(0)
