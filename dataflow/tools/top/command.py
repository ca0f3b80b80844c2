"""`dataflow top [ENDPOINT]`: follow trainings until they end, print them once, or serve them as a page."""

from __future__ import annotations

from threading import Event
from typing import TYPE_CHECKING

import click

from dataflow.tools.terminal.options import json_option, plain_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from dataflow.tools.top.sources import FigureSource
    from dataflow.tools.top.view import Follower, TopView

PERIOD_S = 1.0
_FIRST_TRIES = 4
"""Readings in which a second page of each process should come."""


@click.command(short_help="Follow the trainings that run: rates, waiting, what holds them up.")
@click.argument("endpoint", required=False)
@click.option("--once", is_flag=True, help="Print what is there, with rates of about a second, and end.")
@json_option
@click.option("--web", is_flag=True, help="Serve a page for a browser on this machine, in place of a table.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Number of the port of that page, on 127.0.0.1; 0: a free one.",
    show_default="9401",
)
@plain_errors
def top(endpoint: str | None, once: bool, json_path: str | None, web: bool, port: int | None) -> None:
    """Follow the trainings of yours that run on this machine, once a second.

    They need not be started for it. ENDPOINT is that of a training on another machine, which
    DATAFLOW_METRICS gave it. Shown are ranks, samples a second, the share of the time spent waiting for
    batches, where the bottleneck is and what to do about it, batches that are ready, bytes, cache, and the
    last decisions with their reasons. It ends when the trainings have ended, with their last figures. The
    exit code is 1 where none runs.

    \b
    Examples:
      dataflow top
      dataflow top http://node7:9400
      dataflow top --once --json figures.json
      dataflow top --web --port 8080
    """  # noqa: D301 - click wants the control character
    from dataflow.tools.top.sources import Endpoint, MachinePages
    from dataflow.tools.top.view import Follower

    if web and (once or json_path):
        raise click.UsageError("--web serves a page until it is interrupted: no --once, no --json")
    if port is not None and not web:
        raise click.UsageError("--port is for --web")
    source: FigureSource = Endpoint(endpoint) if endpoint else MachinePages()
    follower = Follower(source)
    if web:
        from dataflow.tools.top.web import serve

        serve(follower, 9401 if port is None else port)
        return
    from rich.console import Console

    console = Console(highlight=False)
    try:
        if once or json_path or not console.is_terminal:
            _print_once(follower, console, json_path)
        else:
            _follow(follower, console)
    except KeyboardInterrupt:
        pass


def first_view(follower: Follower, wait: Callable[[float], object]) -> TopView:
    """Return a view with rates, as soon as there is one. `DataflowError` where no training runs."""
    from sharding.errors import DataflowError

    view = follower.view()
    if view.fault:
        raise DataflowError(view.fault)
    if not view.runs:
        raise DataflowError(follower.nothing())
    for _ in range(_FIRST_TRIES):
        if follower.has_rates:
            break
        wait(PERIOD_S)
        view = follower.view()
    return view


def _print_once(follower: Follower, console: Console, json_path: str | None) -> None:
    from dataflow.tools.terminal.report import Page, save
    from dataflow.tools.top.screen import screen_of

    view = first_view(follower, Event().wait)
    if json_path != "-":
        console.print(screen_of(view, console.width))
    save(Page("dataflow top", view.to_json()), json_path)


def _follow(follower: Follower, console: Console) -> None:
    from rich.live import Live

    from dataflow.tools.top.screen import screen_of
    from sharding.errors import DataflowError

    view, wait = follower.view(), Event().wait
    if view.fault or not view.runs:
        raise DataflowError(view.fault or follower.nothing())
    with Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False) as live:
        while True:
            live.update(screen_of(view, console.width), refresh=True)
            if not view.runs and not view.fault:
                break
            wait(PERIOD_S)
            view = follower.view()
