"""Serve the view as a page for browsers of this machine: two addresses, GET only, no name but loopback's.

Figures are read when a page asks, at most once in most of a second however many are open.
"""

from __future__ import annotations

import errno
import json
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import click

from dataflow.live.endpoint import is_for_loopback
from dataflow.tables import number_text
from dataflow.tools.top.page import PAGE, POLICY
from dataflow.tools.top.screen import (
    HEADINGS,
    PART_NAMES,
    answer_of,
    cells_of,
    decision_cells,
    title_of,
)
from dataflow.tools.top.view import Follower, TopView, TrainingView
from sharding.errors import DataflowError

HOST = "127.0.0.1"
_FRESH_S = 0.8
_PATIENCE_S = 10.0
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


def payload_of(view: TopView, nothing: str = "") -> dict[str, Any]:
    """Return what the page shows, as texts. `nothing`: why no training runs, where none does."""
    return {
        "at": time.strftime("%H:%M:%S", time.localtime(view.at)),
        "fault": view.fault or ("" if view.runs else nothing),
        "notes": " ".join(view.notes),
        "trainings": [_training(one, view.at) for one in view.trainings],
    }


def _training(one: TrainingView, at: float) -> dict[str, Any]:
    rate = one.batches_per_s if one.samples_per_s is None else one.samples_per_s
    unit = "batches/s" if one.samples_per_s is None and rate is not None else "samples/s"
    shown = "-" if rate is None else number_text(rate)
    return {
        "job": one.job,
        "title": title_of(one),
        "is_over": one.is_over,
        "where": one.where and f"bottleneck: {one.where}",
        "answer": answer_of(one),
        "parts": [
            (part, f"{PART_NAMES.get(part, part)} {share:.0%}", share) for part, share in one.shares.items()
        ],
        "rate": rate,
        "rate_text": f"{shown} {unit} on all ranks that are seen, over the last two minutes",
        "headings": HEADINGS,
        "rows": list(map(cells_of, one.loaders)),
        "decisions": [
            f"{age}: {what} ({why})"
            for age, what, why in (decision_cells(decision, at) for decision in one.decisions)
        ],
    }


class PageServer(ThreadingHTTPServer):
    """The server of the page, on this machine alone.

    Args:
        follower: what is shown.
        port: 0: a free one.

    Raises:
        DataflowError: the port is in use, or may not be used.
    """

    daemon_threads = True

    def __init__(self, follower: Follower, port: int) -> None:
        self.follower = follower
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
            raise DataflowError(
                f"port {port} on {HOST} {why}: name another with --port, or --port 0 for a free one"
            ) from None

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{HOST}:{self.server_address[1]}/"

    def figures(self) -> bytes:
        """Return what the page shows now, as JSON."""
        view = self.follower.view(at_most_each_s=_FRESH_S)
        nothing = "" if view.runs or view.fault else self.follower.nothing()
        return json.dumps(payload_of(view, nothing)).encode()


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    timeout = _PATIENCE_S
    server_version, sys_version = "dataflow", ""

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Return what answers requests of all methods: the base class looks for `do_GET` and others."""
        if name.startswith("do_"):
            return self._respond
        raise AttributeError(name)

    def _respond(self) -> None:
        answers: dict[str, tuple[str, Callable[[], bytes]]] = {
            "/": ("text/html; charset=utf-8", PAGE.encode),
            "/figures.json": ("application/json", self.server.figures),
        }
        text = "text/plain; charset=utf-8"
        if not is_for_loopback(self.headers.get("Host", "")):
            self._answer(HTTPStatus.FORBIDDEN, text, b"this page is for http://127.0.0.1 and localhost\n")
        elif self.command != "GET":
            self._answer(HTTPStatus.METHOD_NOT_ALLOWED, text, b"GET only\n")
        elif (found := answers.get(self.path.partition("?")[0])) is None:
            self._answer(HTTPStatus.NOT_FOUND, text, b"there are / and /figures.json\n")
        else:
            self._answer(HTTPStatus.OK, found[0], found[1]())

    def _answer(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing: a request a second is not news."""


def serve(follower: Follower, port: int) -> None:
    """Serve the page until it is interrupted."""
    with PageServer(follower, port) as server:
        view = follower.view()
        if view.fault or not view.runs:
            click.echo(view.fault or follower.nothing(), err=True)
        click.echo(f"open {server.url} in a browser on this machine; Ctrl-C ends")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("")
