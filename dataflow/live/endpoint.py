"""The process that serves metrics over HTTP: what the ranks of one node write on their pages.

A process of its own, so that no scraper, however slow, can cost the training anything: it has the listening
socket from the training process, reads pages when it is asked, and ends when that process does (it watches
its pidfd). It serves `/metrics` (Prometheus), `/healthz`, `/readyz`, `/figures` (the records as JSON), and
imports no torch. Every connection has one request and a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from dataflow.live.health import LIMIT_S, liveness, readiness
from dataflow.live.reading import read_pages, start_ticks
from dataflow.live.record import TrainingRecord, to_json

DEADLINE_S = 10.0
"""Seconds that one connection may take, whatever its client does."""
_MOST_CONNECTIONS = 32
_MOST_REQUEST_BYTES = 8192
_NICE = 5

Answer = tuple[int, str, bytes]
"""Status, content type and body."""
_REASONS = {
    200: "OK",
    400: "Bad Request",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Unavailable",
}
_LOOPBACK = {"127.0.0.1", "localhost", "[::1]"}
"""Names of this machine for itself."""
_TEXT, _JSON = "text/plain; charset=utf-8", "application/json"


def is_for_loopback(host: str) -> bool:
    """Return whether the Host of a request is this machine's name for itself.

    A page of somebody else's that has its own name point here (DNS rebinding) is told by the Host that the
    browser sends.
    """
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name.lower() in _LOOPBACK


class NodeAnswers:
    """Answers requests about the ranks of one node.

    Args:
        parent: id of the process whose ranks are served, and when it was started, in ticks.
        limit_s: seconds without a batch after which a rank is not alive.
        read: reads the pages.
        deadline_s: seconds that one connection may take.
        is_local: whether only this machine can connect; browsers must then ask for its own name.
    """

    def __init__(
        self,
        parent: tuple[int, int],
        limit_s: float = LIMIT_S,
        read: Callable[[], Sequence[TrainingRecord]] = read_pages,
        deadline_s: float = DEADLINE_S,
        *,
        is_local: bool = False,
    ) -> None:
        self._parent, self._limit_s, self._read, self._deadline_s = parent, limit_s, read, deadline_s
        self._is_local = is_local
        self._open: dict[asyncio.StreamWriter, bool] = {}
        """The connections, the oldest first, and whether each is silent: has asked nothing yet."""

    def records(self) -> list[TrainingRecord]:
        """Return the newest record of each rank of the parent's job on this node."""
        every = self._read()
        own = [one for one in every if (one.pid, one.start_ticks) == self._parent]
        if not own:
            return []
        of_job = [one for one in every if (one.job, one.host, one.node) == _job(own[0])]
        order = sorted(of_job, key=lambda one: (one.is_alive, one.written_at))
        newest = {one.rank: one for one in order}
        return [newest[rank] for rank in sorted(newest)]

    def answer(self, method: str, path: str) -> Answer:
        """Return what to answer to a request."""
        if method not in ("GET", "HEAD"):
            return 405, _TEXT, b"only GET and HEAD\n"
        path = path.partition("?")[0].rstrip("/") or "/"
        if path == "/metrics":
            return 200, *exposition(self.records())
        if path == "/figures":
            return 200, _JSON, to_json(self.records())
        if path == "/healthz":
            return _health(*liveness(self.records(), time.time(), self._limit_s))
        if path == "/readyz":
            return _health(*readiness(self.records()))
        if path == "/":
            return 200, _TEXT, b"dataflow: /metrics /healthz /readyz /figures\n"
        return 404, _TEXT, b"not found: /metrics /healthz /readyz /figures\n"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection: one request, within the deadline."""
        if len(self._open) >= _MOST_CONNECTIONS:  # silent clients must not keep out one that asks
            oldest = next((other for other, is_silent in self._open.items() if is_silent), writer)
            self._open.pop(oldest, None)
            oldest.transport.abort()
        self._open[writer] = True
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._serve(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client is gone, too slow, or no client of HTTP
        finally:
            self._open.pop(writer, None)
            if writer.transport.get_write_buffer_size():
                writer.transport.abort()  # what a slow client has not taken is dropped
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self._open[writer] = False
        parts = head.partition(b"\r\n")[0].decode("latin-1").split(" ")
        host = _host_in(head)
        if self._is_local and host is not None and not is_for_loopback(host):
            status, content_type, body = 403, _TEXT, b"this address is for http://127.0.0.1 and localhost\n"
        elif len(parts) == 3:
            status, content_type, body = self.answer(parts[0], parts[1])
        else:
            status, content_type, body = 400, _TEXT, b"no request of HTTP\n"
        lines = (
            f"HTTP/1.1 {status} {_REASONS[status]}",
            f"Content-Type: {content_type}",
            f"Content-Length: {len(body)}",
            "Cache-Control: no-store",
            "Connection: close",
        )
        writer.write("\r\n".join((*lines, "", "")).encode("latin-1"))
        if parts[0] != "HEAD":
            writer.write(body)
        await writer.drain()
        writer.write_eof()
        await reader.read(1)  # the client closes, or the deadline comes


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

    def describe(self) -> Iterator[Any]:
        """Nothing: a registry collects otherwise, when this is registered."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """Yield a family of samples for each instrument."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        from dataflow.live.instruments import points_of

        families: dict[str, Any] = {}
        for point in points_of(self._records):
            one = point.instrument
            kind = CounterMetricFamily if one.kind == "counter" else GaugeMetricFamily
            if one.name not in families:
                labels = list(point.attributes)
                families[one.name] = kind(one.prometheus_name, one.description, labels=labels)
            families[one.name].add_metric(list(point.attributes.values()), point.value)
        yield from families.values()


def _host_in(head: bytes) -> str | None:
    """Return the Host that a request names; None: it names none, so no browser has sent it."""
    for line in head.split(b"\r\n")[1:]:
        name, _, value = line.decode("latin-1").partition(":")
        if name.strip().lower() == "host":
            return value.strip()
    return None


def _job(record: TrainingRecord) -> tuple[str, str, int]:
    return record.job, record.host, record.node


def _health(is_well: bool, text: str) -> Answer:
    return 200 if is_well else 503, _TEXT, f"{text}\n".encode()


def main(arguments: str) -> None:
    """Serve until the parent ends.

    Args:
        arguments: JSON: "fd" of the listening socket, "pid" of the parent, "limit_s".
    """
    given = json.loads(arguments)
    parent = given["pid"], start_ticks(given["pid"])
    if os.getppid() != parent[0]:
        return  # it has ended already
    pidfd = os.pidfd_open(parent[0])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training, whose end ends this
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    listener = socket.socket(fileno=given["fd"])
    is_local = ipaddress.ip_address(listener.getsockname()[0]).is_loopback
    asyncio.run(_run(NodeAnswers(parent, given["limit_s"], is_local=is_local), listener, pidfd))


async def _run(endpoint: NodeAnswers, listener: socket.socket, pidfd: int) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(pidfd, over.set)
    loop.add_signal_handler(signal.SIGTERM, over.set)
    server = await asyncio.start_server(endpoint.serve, sock=listener, limit=_MOST_REQUEST_BYTES)
    endpoint.answer("GET", "/metrics")  # imports what that needs before the first scrape
    await over.wait()
    server.close()
