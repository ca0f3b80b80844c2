"""`dataflow doctor -- COMMAND`: run a training, and tell where its steps' time goes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from dataflow.tools.terminal.options import OutputPath, json_option, picture_option, plain_errors

if TYPE_CHECKING:
    from dataflow.timing.records import RankRecord

_NOTHING = (
    "nothing to report: no loop over a dataflow.DataLoader or a GradSchedule was seen, or it was killed "
    "before 50 steps. `from dataflow import DataLoader` in place of torch's (the same arguments) tells how "
    "long steps wait for data. A loop over GradSchedule(loader, model, optimizer, ...) also tells computing, "
    "communication, slow ranks and optimizer apart: docs/guide/gradient-accumulation.md."
)
_NO_WINDOW = (
    "nothing to report: a GradSchedule was seen on {where}, but none of its windows has ended. Its loader "
    'had no batch (on any rank; on one, with uneven="min"), or fewer than a window has, with partial="drop"; '
    "or the loop was left before step() had ended a window."
)
_NO_STEP = (
    "nothing to report: a loop over a dataflow.DataLoader was seen on {where}, but no step of it has ended. "
    "The loader had no batch, or the loop was left in its first step."
)


@click.command(
    context_settings={"ignore_unknown_options": True},
    short_help="Run a training, and tell where its steps' time goes.",
)
@json_option
@picture_option(".html", name="--html", text="Write a page with pictures")
@click.option(
    "--trace", type=OutputPath(), metavar="PATH", help="Write a Chrome trace, which Perfetto shows."
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where ranks leave what they noted, to stay there; for several machines, one that they share."
    "  [default: a temporary folder]",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def doctor(
    command: tuple[str, ...],
    json_path: str | None,
    picture: str | None,
    trace: str | None,
    folder: Path | None,
) -> None:
    """Run a training command, and tell where the time of its steps goes.

    COMMAND is run as it is; every GradSchedule in it notes where its windows' time goes, and at the end the
    ranks are compared. Of a plain loop over a dataflow.DataLoader, how long it waited for data is told. The
    exit code is the command's. Without COMMAND, what an earlier run left in --folder is reported.

    \b
    Examples:
      dataflow doctor -- torchrun --nproc-per-node 2 train.py
      dataflow doctor --html report.html --trace trace.json -- python train.py --epochs 1
      dataflow doctor --folder /shared/run1
    """  # noqa: D301 - click wants the control character
    if not command and folder is None:
        raise click.UsageError("give the command to run: dataflow doctor -- torchrun ... train.py")
    with TemporaryDirectory(prefix="dataflow-doctor-") as temporary:
        place = (folder or Path(temporary)).absolute()
        code = _run(command, place) if command else 0
        _show(place, json_path, picture, trace)
    if code:
        raise click.exceptions.Exit(code)


def _run(command: Sequence[str], folder: Path) -> int:
    """Run it, with a place for records; its exit code, or as in shells 128 + the signal that ended it."""
    from dataflow.timing import VARIABLE
    from dataflow.tools.doctor.saved import record_files

    folder.mkdir(parents=True, exist_ok=True)
    for old in record_files(folder):
        old.unlink()
    with subprocess.Popen(command, env=os.environ | {VARIABLE: str(folder)}) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                continue  # the command got it too, and ends in its own way
    return code if code >= 0 else 128 - code


def _not_reported(records: Sequence[RankRecord]) -> str:
    """Why there is nothing to report."""
    if not records:
        return _NOTHING
    scheduled = [one for one in records if one.in_schedule]
    ranks = sorted({one.rank for one in scheduled or records})
    where = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
    return (_NO_WINDOW if scheduled else _NO_STEP).format(where=where)


def _show(folder: Path, json_path: str | None, picture: str | None, trace: str | None) -> None:
    from rich.console import Console

    from dataflow.timing.report import report_of, write_trace
    from dataflow.tools.doctor.page import page_of
    from dataflow.tools.doctor.saved import read_records
    from dataflow.tools.terminal.report import save

    saved = read_records(folder)
    console = Console(stderr=json_path == "-")
    if not any(one.windows for one in saved.records):
        for line in (*saved.notes, _not_reported(saved.records)):
            console.print(line, markup=False, soft_wrap=True)
        return
    report = report_of(saved.records)
    report = replace(report, notes=(*report.notes, *saved.notes))
    report.show(console)
    if trace is not None:
        write_trace({one.rank: one.events for one in saved.records}, trace)
    save(page_of(report, saved.records), json_path, picture)
