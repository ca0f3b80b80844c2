"""The process that serves metrics over HTTP: what the ranks of one node write on their pages.

A process of its own, so that no scraper, however slow, can cost the training anything: it has the listening
socket from the training process, reads pages when it is asked, and ends when that process does (it watches
its pidfd). It serves `/metrics` (Prometheus), `/healthz`, `/readyz`, `/figures` (the records as JSON), and
imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec

from dataflow.telemetry.serving.http import JSON, TEXT, Answer, HttpServer
from dataflow.telemetry.status.reading import read_pages, start_ticks
from dataflow.telemetry.status.record import TrainingRecord
from dataflow.telemetry.timing.health import LIMIT_S, liveness, readiness

_NICE = 5


class NodeAnswers:
    """Answers requests about the ranks of one node.

    Args:
        parent: id of the process whose ranks are served, and when it was started, in ticks.
        limit_s: seconds without a batch after which a rank is not alive.
        read: reads the pages.
    """

    def __init__(
        self,
        parent: tuple[int, int],
        limit_s: float = LIMIT_S,
        read: Callable[[], Sequence[TrainingRecord]] = read_pages,
    ) -> None:
        self._parent, self._limit_s, self._read = parent, limit_s, read

    def records(self) -> list[TrainingRecord]:
        """Return the newest record of each rank of the parent's job on this node."""
        every = self._read()
        matches = [record for record in every if (record.pid, record.start_ticks) == self._parent]
        if not matches:
            return []
        of_job = [record for record in every if (record.job, record.host, record.node) == _job(matches[0])]
        order = sorted(of_job, key=lambda record: (record.is_alive, record.written_at))
        newest = {record.rank: record for record in order}
        return [newest[rank] for rank in sorted(newest)]

    def answer(self, method: str, path: str) -> Answer:
        """Return what to answer to a request."""
        if method not in ("GET", "HEAD"):
            return 405, TEXT, b"only GET and HEAD\n"
        path = path.partition("?")[0].rstrip("/") or "/"
        if path == "/metrics":
            return 200, *exposition(self.records())
        if path == "/figures":
            return 200, JSON, msgspec.json.encode(self.records())
        if path == "/healthz":
            return _health(*liveness(self.records(), time.time(), self._limit_s))
        if path == "/readyz":
            return _health(*readiness(self.records()))
        if path == "/":
            return 200, TEXT, b"dataflow: /metrics /healthz /readyz /figures\n"
        return 404, TEXT, b"not found: /metrics /healthz /readyz /figures\n"


def exposition(records: Iterable[TrainingRecord]) -> tuple[str, bytes]:
    """Return content type and text of Prometheus's format."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(records))
    return CONTENT_TYPE_LATEST, generate_latest(registry)


class _Collector:
    """The points of some records, as prometheus_client wants them."""

    def __init__(self, records: Iterable[TrainingRecord]) -> None:
        self._records = records

    def collect(self) -> Iterator[Any]:
        """Yield a family of samples for each instrument."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        from dataflow.telemetry.serving.instruments import points_of

        families: dict[str, Any] = {}
        for point in points_of(self._records):
            metric = point.instrument
            kind = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            if metric.name not in families:
                labels = list(point.attributes)
                families[metric.name] = kind(metric.prometheus_name, metric.description, labels=labels)
            families[metric.name].add_metric(list(point.attributes.values()), point.value)
        yield from families.values()


def _job(record: TrainingRecord) -> tuple[str, str, int]:
    return record.job, record.host, record.node


def _health(is_well: bool, text: str) -> Answer:
    return 200 if is_well else 503, TEXT, f"{text}\n".encode()


def main(arguments: str) -> None:
    """Serve until the parent ends.

    Args:
        arguments: JSON: "fd" of the listening socket, "pid" of the parent, "limit_s".
    """
    options = json.loads(arguments)
    parent = options["pid"], start_ticks(options["pid"])
    if os.getppid() != parent[0]:
        return  # it has ended already
    pidfd = os.pidfd_open(parent[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training, whose end ends this
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    answers = NodeAnswers(parent, options["limit_s"])
    asyncio.run(_serve(answers, socket.socket(fileno=options["fd"]), pidfd))


async def _serve(answers: NodeAnswers, listener: socket.socket, pidfd: int) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, over.set)
    loop.add_signal_handler(signal.SIGTERM, over.set)
    answers.answer("GET", "/metrics")  # imports what that needs before the first scrape
    await HttpServer(listener, answers.answer).serve(over)
