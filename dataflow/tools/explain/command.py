"""`dataflow explain SOURCE --state FILE --step N`: print which samples were in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from dataflow.tools.terminal.options import (
    COUNT,
    DatasetArguments,
    OutputPath,
    json_option,
    named_function,
    option,
    options_of,
    plain_errors,
)

if TYPE_CHECKING:
    import pyarrow as pa

    from dataflow.explain.accumulated import NumberedPlace
    from dataflow.explain.run import ExplainedRun

_FROM_0 = click.IntRange(min=0)
_STATE = "File with the loader's state, JSON or of torch.save; FILE:path.to.loader where it has several."
state_option = click.option("--state", required=True, metavar="FILE[:PATH]", help=_STATE)


@dataclass(frozen=True, kw_only=True)
class ExplainSettings:
    """The step that is asked for, and how much is told of it."""

    state: str = option(_STATE, metavar="FILE[:PATH]")
    step: int | None = option(
        "Number of the step, a batch of all ranks, counted since the training began.",
        _FROM_0,
        None,
        metavar="N",
        show_default="the last one",
    )
    around: int = option("Number of steps before and after it that are told, too.", _FROM_0, 0, metavar="N")
    accumulate: int = option(
        "Number of microbatches a rank in an optimizer step, as GradSchedule has it; --step is one.",
        COUNT,
        1,
        metavar="N",
    )
    rank: int | None = option(
        "Number of the rank whose samples are told.", _FROM_0, None, metavar="N", show_default="all ranks"
    )
    rows: int = option("Number of samples that are printed; files have all of them.", COUNT, 50, metavar="N")
    no_keys: bool = option("Read nothing but the catalog: leave keys of samples out.", bool, False)
    epoch: int | None = option(
        "Number of the epoch of a step, for the state of an older release.",
        _FROM_0,
        None,
        metavar="N",
        show_default="by --step",
    )
    position: int | None = option(
        "Number of samples (rows, with batching=) of that epoch before the step.",
        _FROM_0,
        None,
        metavar="N",
        show_default="by --step",
    )
    global_batch: int | None = option(
        "Number of samples (rows) of all ranks in a step, for such a state.",
        COUNT,
        None,
        metavar="N",
        show_default="by --step",
    )
    world_size: int = option("Number of ranks, for such a state.", COUNT, 1, metavar="N")
    tail: Literal["drop", "pad", "even", "uneven"] | None = option(
        "Rule for the last batch of an epoch, for such a state.",
        click.Choice(["drop", "pad", "even", "uneven"]),
        None,
    )


@click.command(short_help="Show which samples were in a step of a training.")
@options_of(ExplainSettings)
@options_of(DatasetArguments, "dataset")
@json_option
@click.option(
    "--html", type=OutputPath(), metavar="PATH", help="Write a page with the samples themselves to this file."
)
@plain_errors
def explain(
    settings: ExplainSettings, dataset: DatasetArguments, json_path: str | None, html: str | None
) -> None:
    """Show which samples were in a step of a training.

    SOURCE is the data that the training had, as `dataflow index` takes it, or package.module:function, which
    makes its DataLoader: for mixtures, views, joins, batches by length and transforms. The state is that of
    any later checkpoint. Nothing is read but catalogs and, where samples have keys, their keys. No training
    is started, and no other rank is asked. --html makes the batches again, and shows what is in them.

    \b
    Examples:
      dataflow explain data/train.catalog --state checkpoint.pt --step 41237
      dataflow explain 'data/*.tar' --state checkpoint.pt:loader --step 41237 --rank 3 --around 5
      dataflow explain my_project.data:train_loader --state state.json --step 41237 --html step.html
      dataflow explain data/ --state old.pt --epoch 2 --position 40960 --global-batch 1024
    """  # noqa: D301 - click wants the control character
    from dataflow.explain.batch import other_transforms
    from dataflow.explain.provenance import notes_of, table_of
    from dataflow.tools.explain.saved import state_in
    from dataflow.tools.terminal.report import Page, save, show

    state = state_in(settings.state)
    run = run_of(dataset, state)
    try:
        said = dict[str, None]()
        places, asked = _places(run, settings, said)
        table = table_of(run, places, settings.rank, keys=not settings.no_keys, notes=said)
    except IndexError as error:  # a step or rank that there was not
        raise ValueError(str(error)) from error
    differs = other_transforms(run, may_lack=html is None)
    notes = [*notes_of(table), *([differs] if differs else [])]
    if json_path != "-":
        show(_told(run, places, table, notes, settings.rows))
    rows = table.drop_columns("draws").to_pylist()
    steps = [{**row.place._asdict(), "step": row.number, "microbatch": row.microbatch or 0} for row in places]
    save(Page("dataflow explain", {"steps": steps, "rows": rows, "notes": [*notes]}), json_path)
    if html is not None:
        from dataflow.tools.explain.page import page_of

        Path(html).write_text(page_of(run, places, table, notes, asked), "utf-8")


def run_of(dataset: DatasetArguments, state: Mapping[str, Any]) -> ExplainedRun:
    """The run of a state, over shards or in a loader that a function of the user's makes."""
    from dataflow.explain.run import run_of_loader, run_of_state

    first = dataset.source[0]
    if len(dataset.source) > 1 or ":" not in first or "://" in first or Path(first).exists():
        return run_of_state(state, dataset.open_with())
    if dataset.options:
        raise ValueError(f"{first} makes the loader: leave out the options that describe shards")
    from dataflow.loader import DataLoader

    loader = named_function(first)()
    if not isinstance(loader, DataLoader):
        raise ValueError(f"{first}() gave a {type(loader).__name__}, and a dataflow.DataLoader is wanted")
    loader.load_state_dict(state)
    return run_of_loader(loader)


def _places(
    run: ExplainedRun, settings: ExplainSettings, notes: dict[str, None]
) -> tuple[list[NumberedPlace], int | None]:
    """The places that are told, and the number of the step that is asked for."""
    from dataflow.explain.accumulated import NumberedPlace, num_optimizer_steps, numbered_places
    from dataflow.explain.provenance import given_place

    accumulate, step = settings.accumulate, settings.step
    where = (settings.epoch, settings.position, settings.global_batch)
    if where != (None, None, None):
        if step is not None or settings.around or accumulate > 1:
            raise ValueError("say --step, or --epoch, --position and --global-batch, not both")
        place = given_place(run, *where, settings.world_size, settings.tail)
        return [NumberedPlace(-1, None, place)], None
    known_from, num = 0, 1
    if run.history is not None and (step is None or settings.around):
        known_from, num = run.history.known_from, run.history.num_steps
        num = num if accumulate == 1 else num_optimizer_steps(run, accumulate)
    step = max(0, num - 1) if step is None else step
    asked = numbered_places(run, step, accumulate, notes)
    if not settings.around:
        return asked, step
    around = range(max(known_from, step - settings.around), min(num, step + settings.around + 1))
    return numbered_places(run, around, accumulate, notes), step


def _told(
    run: ExplainedRun, places: Sequence[NumberedPlace], table: pa.Table, notes: Sequence[str], most: int
) -> list[Any]:
    """The parts of the report on a terminal."""
    from dataflow.tools.terminal.report import Table

    parts: list[Any] = []
    for numbered in places:
        place = numbered.place
        ranks = f"{place.world_size:,} rank{'s' if place.world_size > 1 else ''}"
        parts.append(
            f"{numbered.name}: epoch {place.epoch}, from position {place.position:,}; batch of "
            f"{place.global_batch:,} on {ranks}"
        )
    names = ["step", "rank", "row", "sample", "key", "shard", "shard_row", "offset", "length"]
    for name in ("microbatch", "source", "piece_start", "piece_length", "repeat"):
        column = table[name]
        if column.null_count < len(column) and any(column.to_pylist()):
            names.append(name)
    names = [name for name in names if table[name].null_count < table.num_rows]
    shown = table.select(names).slice(0, most).to_pylist()
    rows = [[_cell(name, row[name]) for name in names] for row in shown]
    parts.append(Table(names, rows, left=0))
    if table.num_rows > most:
        parts.append(f"{table.num_rows - most:,} more samples: --rows prints more, --json writes all")
    if len(run.dataset.sources) > 1:
        shares = Counter(table["source"].to_pylist())
        facts = (f"source {source}: {count / table.num_rows:.1%}" for source, count in sorted(shares.items()))
        parts.append("; ".join(facts))
    return [*parts, *notes]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name == "shard":
        return str(value).rpartition("/")[2]
    return "yes" if value is True else "" if value is False else str(value)
