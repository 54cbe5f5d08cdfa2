"""The status of a job as metrics of Prometheus; docs/how-to/watch-a-job.md lists them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.metrics_core import Metric

    from syncvar.cli.dashboard.job_poller import Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class MetricRow(NamedTuple):
    """One metric: the value at a key of each item of a list in the status, times a factor."""

    name: str
    items: str  # "ranks", "servers", "calls", "links" or "stragglers"
    key: str
    labels: tuple[str, ...]
    text: str
    factor: float = 1.0
    is_counter: bool = False


_RANK, _SERVER = ("rank", "host"), ("server", "host")
_CALL, _LINK = ("call", "variable", "path"), ("rank", "peer", "path")
METRICS = (
    MetricRow("syncvar_rank_call_ratio", "ranks", "call_share", _RANK, "Share of time in calls"),
    MetricRow(
        "syncvar_rank_wait_ratio", "ranks", "wait_share", _RANK, "Share of time in waits for ranks"
    ),
    MetricRow(
        "syncvar_rank_resident_memory_bytes", "ranks", "rss_bytes", _RANK, "Resident memory"
    ),
    MetricRow("syncvar_rank_cpu_ratio", "ranks", "cpu_share", _RANK, "Processor time, 1: one core"),
    MetricRow("syncvar_calls_total", "ranks", "calls", _RANK, "Calls so far", is_counter=True),
    MetricRow("syncvar_rank_calls_per_second", "ranks", "calls_per_s", _RANK, "Calls each second"),
    MetricRow("syncvar_rank_bytes_per_second", "ranks", "bytes_per_s", _RANK, "Bytes in calls"),
    MetricRow("syncvar_steps_total", "ranks", "steps", _RANK, "Steps so far", is_counter=True),
    MetricRow("syncvar_rank_steps_per_second", "ranks", "steps_per_s", _RANK, "Steps each second"),
    MetricRow(
        "syncvar_rank_clock_offset_seconds", "ranks", "clock_offset_ns", _RANK,
        "Monotonic clock of its host minus that of the launcher", 1e-9,
    ),
    MetricRow(
        "syncvar_rank_clock_error_seconds", "ranks", "clock_error_ns", _RANK,
        "Largest error of that offset", 1e-9,
    ),
    MetricRow(
        "syncvar_server_resident_memory_bytes", "servers", "rss_bytes", _SERVER, "Resident memory"
    ),
    MetricRow(
        "syncvar_server_cpu_ratio", "servers", "cpu_share", _SERVER, "Processor time, 1: one core"
    ),
    MetricRow("syncvar_call_ratio", "calls", "share", _CALL, "Share of time, mean over ranks"),
    MetricRow("syncvar_call_calls_per_second", "calls", "calls_per_s", _CALL, "Calls each second"),
    MetricRow("syncvar_call_bytes_per_second", "calls", "bytes_per_s", _CALL, "Bytes each second"),
    MetricRow("syncvar_link_bytes_per_second", "links", "bytes_per_s", _LINK, "Bytes each second"),
    MetricRow(
        "syncvar_straggler_late_ratio", "stragglers", "late_share", ("rank",),
        "Share of all waiting that is for this rank",
    ),
    MetricRow(
        "syncvar_straggler_cost_ratio", "stragglers", "cost_share", ("rank",),
        "Share of time that each other rank waits for it",
    ),
    MetricRow(
        "syncvar_straggler_age_seconds", "stragglers", "since_s", ("rank",),
        "Length of the time that this is about",
    ),
)  # fmt: skip
_STATES = (
    "starting",
    "running",
    "waiting",
    "stopped",
    "silent",
    "spare",
    "finished",
    "lost",
    "failed",
)


class StatusCollector:
    """The metrics of one snapshot."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, each with the values of all ranks."""
        snapshot = self._snapshot
        is_up = snapshot.state == "answers"
        yield GaugeMetricFamily("syncvar_up", "1 if the launcher answers", float(is_up))
        age_s = time.monotonic() - snapshot.time_s
        yield GaugeMetricFamily("syncvar_status_age_seconds", "Since the last answer", age_s)
        if is_up:  # else the values are old
            yield from _job_metrics(snapshot.status)
            yield from _wait_metrics(_items(snapshot.status, "ranks"))
            for row in METRICS:
                yield _family(row, _items(snapshot.status, row.items))


def metrics_text(snapshot: Snapshot) -> bytes:
    """Return the metrics of a snapshot in the text format of Prometheus."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(snapshot))
    return generate_latest(registry)


def _family(row: MetricRow, items: list[Mapping[str, Any]]) -> Metric:
    kind = CounterMetricFamily if row.is_counter else GaugeMetricFamily
    family = kind(row.name, row.text, labels=row.labels)
    seen = set()
    for item in items:
        labels = [str(item.get(label, "")) for label in row.labels]
        if isinstance(item.get(row.key), int | float) and tuple(labels) not in seen:
            seen.add(tuple(labels))
            family.add_metric(labels, item[row.key] * row.factor)
    return family


def _job_metrics(status: Mapping[str, Any]) -> Iterator[Metric]:
    job = status.get("job")
    job = job if isinstance(job, dict) else {}
    info = GaugeMetricFamily("syncvar_job_info", "1 for this job", labels=("job",))
    info.add_metric([str(job.get("name", ""))], 1.0)
    yield info
    yield _family(
        MetricRow("syncvar_job_age_seconds", "", "lasted_s", (), "Since the start"), [job]
    )
    yield _family(
        MetricRow("syncvar_job_restarts_total", "", "restarts", (), "Restarts", is_counter=True),
        [job],
    )
    count = GaugeMetricFamily("syncvar_job_ranks", "Ranks by their state", labels=("state",))
    states = [rank.get("state") for rank in _items(status, "ranks")]
    for state in _STATES:
        count.add_metric([state], float(states.count(state)))
    yield count


def _wait_metrics(ranks: list[Mapping[str, Any]]) -> Iterator[Metric]:
    waits = GaugeMetricFamily(
        "syncvar_rank_waits_for_ratio",
        "Share of a rank's time in waits for one late rank",
        labels=("rank", "late_rank"),
    )
    age = GaugeMetricFamily(
        "syncvar_rank_current_call_age_seconds", "Age of the call that it is in", labels=_RANK
    )
    for rank in ranks:
        number, late = str(rank.get("rank", "")), rank.get("waits")
        for other, share in (late if isinstance(late, dict) else {}).items():
            if isinstance(share, int | float):
                waits.add_metric([number, str(other)], share)
        if rank.get("is_in_call") and isinstance(rank.get("age_s"), int | float):
            age.add_metric([number, str(rank.get("host", ""))], rank["age_s"])
    yield waits
    yield age


def _items(status: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = status.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []
