"""`dataflow verify SOURCE --state FILE --account FILE`: whether a run handed out each sample once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from dataflow.tools.explain.command import run_of, state_option
from dataflow.tools.terminal.options import DatasetArguments, json_option, options_of, plain_errors


@click.command(short_help="Verify that a training saw each sample exactly once.")
@options_of(DatasetArguments, "dataset")
@state_option
@click.option(
    "--account",
    "files",
    required=True,
    multiple=True,
    metavar="FILE",
    help="File with what loader.account() returned, as JSON, or a folder of such files (*.json); repeated.",
)
@json_option
@plain_errors
def verify(dataset: DatasetArguments, state: str, files: Sequence[str], json_path: str | None) -> None:
    """Verify that a training saw each sample exactly once, or say where it parted from its plan.

    SOURCE is the data that the training had, or package.module:function, which makes its DataLoader, as for
    `dataflow explain`. Give the accounts of all ranks that lie beside the state, and those of all ranks
    beside each checkpoint from which the training went on. Nothing is read but catalogs and kept lengths. The
    exit code is 1 where the run parted from its plan.

    \b
    Examples:
      dataflow verify data/train.catalog --state checkpoint.pt --account accounts/
      dataflow verify 'data/*.tar' --state state.json --account rank0.json --account rank1.json
    """  # noqa: D301 - click wants the control character
    from dataflow.explain.account import Account
    from dataflow.explain.verify import verified
    from dataflow.tools.explain.saved import state_in
    from dataflow.tools.terminal.report import Page, save, show

    paths = [path for name in files for path in _paths(Path(name))]
    taken = state_in(state)
    run = run_of(dataset, taken)
    accounts = [Account.from_json(_read(path), str(path)) for path in paths]
    report = verified(run, str(taken["fingerprint"]), accounts)
    if json_path != "-":
        show([str(report), *(f"step {step}, rank {rank}: {text}" for step, rank, text in report.left_out)])
    fields = report._asdict() | {
        "is_whole": report.is_whole,
        "departures": [departure._asdict() for departure in report.departures],
        "epochs": [epoch._asdict() for epoch in report.epochs],
    }
    save(Page("dataflow verify", fields), json_path)
    if not report.is_whole:
        raise SystemExit(1)


def _paths(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("*.json"))
    if not files:
        raise ValueError(f"{path} has no file *.json: save json.dumps(loader.account()) there, one a rank")
    return files


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON, as loader.account() is to be saved: {error}") from error
