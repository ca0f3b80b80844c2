"""Serve the view as a page for browsers of this machine: two addresses, GET only, no name but loopback's.

Figures are read when a page asks, at most once in most of a second however many are open.
"""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import time
from contextlib import suppress
from typing import Any

import click

from dataflow.tables import number_text
from dataflow.telemetry.serving.http import JSON, TEXT, Answer, HttpServer
from dataflow.tools.top.page import PAGE, POLICY
from dataflow.tools.top.screen import HEADINGS, PART_NAMES, answer_of, cells_of, decision_cells, title_of
from dataflow.tools.top.view import Follower, TopView, TrainingView
from sharding.errors import DataflowError

HOST = "127.0.0.1"
_FRESH_S = 0.8
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def payload_of(view: TopView, nothing: str = "") -> dict[str, Any]:
    """Return what the page shows, as texts. `nothing`: why no training runs, where none does."""
    return {
        "at": time.strftime("%H:%M:%S", time.localtime(view.at)),
        "fault": view.fault or ("" if view.runs else nothing),
        "notes": " ".join(view.notes),
        "trainings": [_training(training, view.at) for training in view.trainings],
    }


def _training(view: TrainingView, now: float) -> dict[str, Any]:
    rate = view.batches_per_s if view.samples_per_s is None else view.samples_per_s
    unit = "batches/s" if view.samples_per_s is None and rate is not None else "samples/s"
    shown = "-" if rate is None else number_text(rate)
    return {
        "job": view.job,
        "title": title_of(view),
        "is_over": view.is_over,
        "where": view.where and f"bottleneck: {view.where}",
        "answer": answer_of(view),
        "parts": [
            (part, f"{PART_NAMES.get(part, part)} {share:.0%}", share) for part, share in view.shares.items()
        ],
        "rate": rate,
        "rate_text": f"{shown} {unit} on all ranks that are seen, over the last two minutes",
        "headings": HEADINGS,
        "rows": list(map(cells_of, view.loaders)),
        "decisions": [
            f"{age}: {what} ({why})"
            for age, what, why in (decision_cells(decision, now) for decision in view.decisions)
        ],
    }


class PageAnswers:
    """Answers a browser's requests for the page and its figures.

    Args:
        follower: what is shown.
    """

    def __init__(self, follower: Follower) -> None:
        self._follower = follower

    def answer(self, method: str, path: str) -> Answer:
        """Return what to answer to a request."""
        path = path.partition("?")[0]
        if method != "GET":
            return 405, TEXT, b"GET only\n"
        if path == "/":
            return 200, "text/html; charset=utf-8", PAGE.encode()
        if path == "/figures.json":
            view = self._follower.view(at_most_each_s=_FRESH_S)
            nothing = "" if view.runs or view.fault else self._follower.nothing()
            return 200, JSON, json.dumps(payload_of(view, nothing)).encode()
        return 404, TEXT, b"there are / and /figures.json\n"


def page_server(follower: Follower, port: int) -> HttpServer:
    """Return the server of the page, on this machine alone.

    Args:
        follower: what is shown.
        port: 0: a free one.

    Raises:
        DataflowError: the port is in use, or may not be used.
    """
    try:
        listener = socket.create_server((HOST, port))
    except OSError as error:
        why = "is in use" if error.errno == errno.EADDRINUSE else f"cannot be used ({error.strerror})"
        raise DataflowError(
            f"port {port} on {HOST} {why}: name another with --port, or --port 0 for a free one"
        ) from None
    return HttpServer(listener, PageAnswers(follower).answer, headers=_HEADERS)


def serve(follower: Follower, port: int) -> None:
    """Serve the page until it is interrupted."""
    server = page_server(follower, port)
    view = follower.view()
    if view.fault or not view.runs:
        click.echo(view.fault or follower.nothing(), err=True)
    click.echo(
        f"open http://{HOST}:{server.listener.getsockname()[1]}/ in a browser on this machine; Ctrl-C ends"
    )
    with suppress(KeyboardInterrupt):
        asyncio.run(server.serve(asyncio.Event()))
    click.echo("")
