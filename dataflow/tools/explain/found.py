"""`dataflow find SOURCE --state FILE --key KEY`: print at which steps samples came, and when next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from dataflow.tools.explain.command import run_of, state_option
from dataflow.tools.terminal.options import DatasetArguments, json_option, options_of, plain_errors


@click.command(short_help="Show at which steps samples were delivered, and when they come next.")
@options_of(DatasetArguments, "dataset")
@state_option
@click.option("--key", "keys", multiple=True, metavar="KEY", help="Key of a sample; may be repeated.")
@click.option("--keys", "keys_file", metavar="FILE", help="File with a key a line.")
@click.option(
    "--on",
    default="__key__",
    metavar="NAME",
    show_default=True,
    help="Column of the keys.",
)
@json_option
@plain_errors
def find(
    dataset: DatasetArguments,
    state: str,
    keys: Sequence[str],
    keys_file: str | None,
    on: str,
    json_path: str | None,
) -> None:
    """Show at which steps of a training samples were delivered, and when they come next.

    SOURCE is the data that the training had, or package.module:function, which makes its DataLoader, as for
    `dataflow explain`. The state is that of any checkpoint: steps before it are told. The keys of all samples
    are read once.

    \b
    Examples:
      dataflow find data/train.catalog --state checkpoint.pt --key sample0731 --key sample0002
      dataflow find 'data/*.parquet' --state checkpoint.pt --keys deleted.txt --on id
    """  # noqa: D301 - click wants the control character
    from dataflow.explain.find import table_of_run
    from dataflow.explain.provenance import notes_of
    from dataflow.tools.explain.saved import state_in
    from dataflow.tools.terminal.report import Page, Table, save, show

    if bool(keys) == bool(keys_file):
        raise ValueError("say which samples, by --key KEY or --keys FILE")
    taken = state_in(state)
    run = run_of(dataset, taken)
    samples: Any = keys_file or [*keys]
    table = table_of_run(run, taken["epoch"], taken["position"], samples, on)
    rows, notes = table.to_pylist(), notes_of(table)
    if json_path != "-":
        names = ["key", "sample", "delivered", "next"]
        show([Table(names, [_cells(row) for row in rows], left=4), *(f"note: {note}" for note in notes)])
    save(Page("dataflow find", {"rows": rows, "notes": [*notes]}), json_path)


def _cells(row: dict[str, Any]) -> list[str]:
    """A sample in words, such as "twice: steps 118 and 41,237"."""
    if row["sample"] is None:
        return [row["key"], "none", "", ""]
    steps = [f"{step:,}" for step in row["steps"]]
    times = {0: "not seen yet", 1: "once: step ", 2: "twice: steps "}.get(
        len(steps), f"{len(steps)} times: steps "
    )
    listed = " and ".join(filter(None, [", ".join(steps[:-1]), *steps[-1:]]))
    coming = "in none of the next epochs"
    if row["next_epoch"] is not None:
        place = f"epoch {row['next_epoch']}, position {row['next_position']:,}"
        coming = place if row["next_step"] is None else f"step {row['next_step']:,} ({place})"
    source = f"{row['sample']:,}" + (f" of source {row['source']}" if row["source"] else "")
    return [row["key"], source, times + listed, coming]
