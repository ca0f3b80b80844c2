"""Start the process that serves metrics: by `serve_metrics`, or because `DATAFLOW_METRICS` says so.

This process opens the listening socket, so that it knows at once of a port in use, and hands it over: it has
neither a thread nor an open socket for metrics afterwards.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from multiprocessing import util
from pathlib import Path

from dataflow.telemetry.status import OFF
from dataflow.telemetry.status.facts import in_one_line, rank_info
from dataflow.telemetry.status.page import page_of_process
from dataflow.telemetry.status.reading import read_pages
from dataflow.telemetry.timing.health import LIMIT_S

_log = logging.getLogger("dataflow")

DEFAULT_ADDRESS = "127.0.0.1:9400"
_NEEDED = "prometheus_client"
_END_S = 2.0
"""Seconds that the process gets to end."""
_START = (
    "import sys; sys.path[:] = {path!r}; from dataflow.telemetry.serving.endpoint import main; "
    "main({arguments!r})"
)


class MetricsEndpoint:
    """The process that serves this node's metrics; `serve_metrics` returns it.

    It ends with this process. Usable as a context manager.

    Attributes:
        address: "host:port" where it listens; "": it does not.
        reason: why it does not; "": it does.

    Examples:
        >>> with serve_metrics("127.0.0.1:0") as endpoint:  # a port that is free
        ...     address = endpoint.address
        >>> address.startswith("127.0.0.1:")
        True
    """

    def __init__(self, address: str = "", reason: str = "", process: subprocess.Popen[bytes] | None = None):
        self.address, self.reason, self._process = address, reason, process
        if process is not None:
            self._at_exit = util.Finalize(None, self.close, exitpriority=4)  # after the page says the end

    def close(self) -> None:
        """End the process. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        self.address, self.reason = "", "it was closed"
        self._at_exit.cancel()
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> MetricsEndpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"MetricsEndpoint({f'http://{self.address}/metrics' if self.address else self.reason})"


def serve_metrics(address: str | int = DEFAULT_ADDRESS, *, limit_s: float = LIMIT_S) -> MetricsEndpoint:
    """Serve the figures of all ranks of this node to Prometheus, over HTTP, from a process of its own.

    All ranks may call it: that of local rank 0 serves, and the others do nothing. Where the port is in use, a
    warning says so, and training goes on. `/metrics`: for Prometheus; `/healthz` and `/readyz`: for
    schedulers of clusters; `/figures`: for `dataflow top http://host:port`.

    Args:
        address: "host:port", or a port alone, which this machine alone can reach. Port 0: one that is free.
        limit_s: seconds without a batch after which `/healthz` answers 503.

    Returns:
        The endpoint, which ends with this process.

    Raises:
        ValueError: it is no address.
        ImportError: prometheus_client is not installed: `pip install 'dataflow-loader[metrics]'`.

    Examples:
        >>> endpoint = serve_metrics(0)
        >>> endpoint.close()
    """
    host, port = checked_address(address)
    if importlib.util.find_spec(_NEEDED) is None:
        raise ImportError(
            f"serving metrics needs another package ({_NEEDED}): pip install 'dataflow-loader[metrics]'"
        )
    if os.environ.get(OFF) == "0":
        return MetricsEndpoint(reason=f"{OFF}=0: this training writes no figures")
    page, rank = page_of_process(), rank_info()
    if rank.local_rank:
        return MetricsEndpoint(reason=f"this is local rank {rank.local_rank}, and local rank 0 serves")
    try:
        endpoint = _started(host, port, limit_s)
    except OSError as error:
        reason = _why_not(host, port, error)
        _log.warning("%s", reason)
        return MetricsEndpoint(reason=reason)
    page.endpoint = endpoint.address
    return endpoint


def serve_as_asked(address: str) -> None:
    """Serve at the address in `DATAFLOW_METRICS`, once; what goes wrong is only logged."""
    page = page_of_process()
    if page.was_asked_to_serve:
        return
    page.was_asked_to_serve = True
    try:
        serve_metrics(address)
    except (ValueError, ImportError) as error:
        _log.warning("DATAFLOW_METRICS=%s: metrics are not served: %s", address, in_one_line(str(error)))


def checked_address(address: str | int) -> tuple[str, int]:
    """Return host and port of an address. `ValueError` if it is none."""
    text = str(address).strip()
    host, separator, port = text.rpartition(":")
    host = host.strip("[]") if separator else ""
    if not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"an address is 'host:port' or a port, such as {DEFAULT_ADDRESS!r}, got {address!r}")
    return host or "127.0.0.1", int(port)


def _started(host: str, port: int, limit_s: float) -> MetricsEndpoint:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family) as listener:
        arguments = {"fd": listener.fileno(), "pid": os.getpid(), "limit_s": limit_s}
        here = str(Path(__file__).parents[3])
        path = [here, *(entry for entry in sys.path if entry and entry != here)]
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is not for that process
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _START.format(path=path, arguments=json.dumps(arguments))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        return MetricsEndpoint(f"{shown}:{listener.getsockname()[1]}", "", process)


def _why_not(host: str, port: int, error: OSError) -> str:
    """Say why nothing is served, and by whom a port is in use."""
    text = os.strerror(error.errno) if error.errno else str(error)
    reason = f"metrics are not served at {host}:{port}: {text}"
    if error.errno != errno.EADDRINUSE:
        return reason
    for record in read_pages():
        if record.is_alive and record.endpoint.rpartition(":")[2] == str(port):
            return (
                f"{reason}: process {record.pid} ({record.program}) serves its own there; take another port"
            )
    return f"{reason}; take another port, or end what listens there (ss -ltnp 'sport = :{port}')"
