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

from dataflow.telemetry.timing import DEFAULT_STEPS, ROUND
from dataflow.tools.terminal.options import OutputPath, json_option, plain_errors
from sharding.printable import printable

if TYPE_CHECKING:
    from dataflow.telemetry.timing.records import StepRecord

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
_NO_LOADER = (
    "nothing to report: no loop over a dataflow.DataLoader was seen, so there is no loader to replay batches "
    "of. `from dataflow import DataLoader` in place of torch's takes the same arguments."
)
_NO_STEP = (
    "nothing to report: a loop over a dataflow.DataLoader was seen on {where}, but no step of it has ended. "
    "The loader had no batch, or the loop was left in its first step."
)


@click.command(
    context_settings={"ignore_unknown_options": True},
    short_help="Run a training, and show where the time of its steps goes.",
)
@json_option
@click.option(
    "--html",
    "picture",
    type=OutputPath(".html"),
    metavar="PATH",
    help="Write a page with pictures to this file, as .html (extra: plot).",
)
@click.option(
    "--trace", type=OutputPath(), metavar="PATH", help="Write a Chrome trace to this file, for Perfetto."
)
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder that ranks write their records to and keep them in; several machines share one.",
    show_default="a temporary folder",
)
@click.option(
    "--headspace",
    is_flag=True,
    help="Replay a few batches from memory in place of the loader, and report how much faster the training "
    "would be with a perfect one.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=ROUND),
    help="Number of steps that --headspace measures with the loader, and again without it.",
    show_default=str(DEFAULT_STEPS),
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@plain_errors
def doctor(
    command: tuple[str, ...],
    json_path: str | None,
    picture: str | None,
    trace: str | None,
    folder: Path | None,
    headspace: bool,
    steps: int | None,
) -> None:
    """Run a training command, and show where the time of its steps goes.

    COMMAND is run as it is. Each GradSchedule in it records where the time of its windows goes, and at the
    end the ranks are compared. For a plain loop over a dataflow.DataLoader the report says how long it waited
    for data. The exit code is the command's. Without COMMAND, the records of an earlier run in --folder are
    reported. With --headspace, steps over a dataflow.DataLoader are measured first as they are, and then with
    copies of some of its batches, from memory; a training is ended when both are measured. Do not use what it
    has saved by then: it trained on the same batches again and again.

    \b
    Examples:
      dataflow doctor -- torchrun --nproc-per-node 2 train.py
      dataflow doctor --html report.html --trace trace.json -- python train.py --epochs 1
      dataflow doctor --folder /shared/run1
      dataflow doctor --headspace -- torchrun --nproc-per-node 2 train.py
      dataflow doctor --headspace --steps 200 --json headspace.json -- python train.py
    """  # noqa: D301 - click wants the control character
    if not command and folder is None:
        raise click.UsageError("give the command to run: dataflow doctor -- torchrun ... train.py")
    if headspace and (picture or trace):
        raise click.UsageError("--headspace writes --json only: no --html, no --trace")
    if steps and not headspace:
        raise click.UsageError("--steps is for --headspace")
    with TemporaryDirectory(prefix="dataflow-doctor-") as temporary:
        records = (folder or Path(temporary)).absolute()
        steps = (steps or DEFAULT_STEPS) if headspace else None
        code = _run(command, records, steps, own_output=json_path != "-") if command else 0
        if headspace:
            _show_data_stall(records, json_path, code)
        else:
            _show(records, json_path, picture, trace)
    if code:
        raise click.exceptions.Exit(code)


def _run(command: Sequence[str], folder: Path, data_stall_steps: int | None, *, own_output: bool) -> int:
    """Run it, with a folder for records; its exit code, or as in shells 128 + the signal that ended it.

    `own_output`: false where standard output is JSON; what it prints is found in stderr then.
    """
    from dataflow.progress.observer import DATA_STALL
    from dataflow.telemetry.timing import VARIABLE
    from dataflow.tools.doctor.saved import all_files

    folder.mkdir(parents=True, exist_ok=True)
    for old in all_files(folder):
        old.unlink()
    asked = {VARIABLE: str(folder), DATA_STALL: str(data_stall_steps or "")}
    with subprocess.Popen(command, env=os.environ | asked, stdout=None if own_output else 2) as process:
        while True:
            try:
                code = process.wait()
                break
            except KeyboardInterrupt:
                continue  # the command got it too, and ends in its own way
    return code if code >= 0 else 128 - code


def _not_reported(records: Sequence[StepRecord]) -> str:
    """Why there is nothing to report."""
    if not records:
        return _NOTHING
    scheduled = [record for record in records if record.in_schedule]
    ranks = sorted({record.rank for record in scheduled or records})
    where = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:8]))}{', ...' * (len(ranks) > 8)}"
    return (_NO_WINDOW if scheduled else _NO_STEP).format(where=where)


def _show(folder: Path, json_path: str | None, picture: str | None, trace: str | None) -> None:
    from rich.console import Console

    from dataflow.telemetry.timing.report import report_of, write_trace
    from dataflow.tools.doctor.page import page_of
    from dataflow.tools.doctor.saved import read_records
    from dataflow.tools.terminal.report import save

    saved = read_records(folder)
    console = Console(stderr=json_path == "-")
    if not any(record.windows for record in saved.records):
        for line in (*saved.notes, _not_reported(saved.records)):
            console.print(printable(line), markup=False, soft_wrap=True)
        return
    report = report_of(saved.records)
    report = replace(report, notes=(*report.notes, *saved.notes))
    report.show(console)
    if trace is not None:
        write_trace({record.rank: record.events for record in saved.records}, trace)
    save(page_of(report, saved.records), json_path, picture)


def _show_data_stall(folder: Path, json_path: str | None, code: int) -> None:
    from rich.console import Console

    from dataflow.telemetry.timing.data_stall_report import data_stall_of_records, reason_without
    from dataflow.tools.doctor.saved import read_data_stall
    from dataflow.tools.terminal.report import Page, Sentence, save, show

    saved = read_data_stall(folder)
    report = data_stall_of_records(saved.records)
    failed = [f"the command failed: exit code {code}, its error is above"] if code else []
    console = Console(stderr=json_path == "-", highlight=False)
    if report is None:
        why = reason_without(saved.records) if saved.records else _NO_LOADER
        show([Sentence(line, whole=True) for line in (*failed, why, *saved.notes)], console)
        return
    lines = [Sentence(report.verdict, "bold", whole=True)]
    show([*lines, *(Sentence(line, whole=True) for line in (*report.lines, *saved.notes, *failed))], console)
    save(Page(report.verdict, report.to_json()), json_path)
