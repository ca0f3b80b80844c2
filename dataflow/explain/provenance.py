"""The table of what was in steps: a row for each sample, or piece of one, that was delivered."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from dataflow.dataset import ShardedDataset
from dataflow.explain.accumulated import NumberedPlace, numbered_places
from dataflow.explain.batch import other_transforms
from dataflow.explain.dealt import WHOLE, DealtRows, dealt_rows, has_step, is_passed_over
from dataflow.explain.located import draws_of, keys_of, located
from dataflow.explain.run import ExplainedRun, Steps, run_of_loader, run_of_state
from dataflow.mixture import Mixture
from sharding.lengths.batching import Batching
from sharding.order.epoch_order import EpochOrder
from sharding.plan.batch_plan import Tail
from sharding.plan.history import StepPlace
from sharding.spans import Ints

if TYPE_CHECKING:
    from dataflow.loader import DataLoader

NOTES = b"notes"
"""The key of a table's metadata that has its notes, as JSON text: a list of sentences."""
_SKIPPED = (
    "on_error= may have left samples out: they are listed all the same, as which of them failed is no "
    "function of the order; stats().skipped of the run names them"
)
_EMPTY = (
    "where on_error= left nothing of a rank's batch, it delivered its last batch once more, which is not told"
)
_SCHEMA = pa.schema(
    {
        "step": pa.int64(),
        "epoch": pa.int64(),
        "position": pa.int64(),
        "rank": pa.int32(),
        "microbatch": pa.int32(),
        "row": pa.int32(),
        "source": pa.int32(),
        "sample": pa.int64(),
        "shard": pa.dictionary(pa.int32(), pa.string()),
        "shard_row": pa.int64(),
        "block": pa.int32(),
        "block_row": pa.int64(),
        "offset": pa.int64(),
        "length": pa.int64(),
        "key": pa.string(),
        "piece_start": pa.int64(),
        "piece_length": pa.int64(),
        "repeat": pa.bool_(),
        "seed": pa.uint64(),
        "draw_epoch": pa.int64(),
        "draw_number": pa.int64(),
        "draws": pa.list_(pa.float64(), 24),
        "matches": pa.list_(pa.struct({"shard": pa.string(), "shard_row": pa.int64()})),
    }
)


def provenance(
    state: Mapping[str, Any],
    dataset: ShardedDataset | Mixture,
    steps: Steps | None = None,
    *,
    rank: int | None = None,
    batching: Batching | None = None,
    keys: bool = True,
    accumulate: int = 1,
    epoch: int | None = None,
    position: int | None = None,
    global_batch: int | None = None,
    world_size: int = 1,
    tail: Tail | None = None,
) -> pa.Table:
    """Return which samples were in steps of a training, from a state of its loader and its dataset.

    Nothing of the data is read but what holds keys.

    Args:
        state: what `DataLoader.state_dict` returned, at any later step of the same training.
        dataset: the `ShardedDataset` or `Mixture` that the training had.
        steps: numbers of global batches, counted from the begin of the training.
        rank: only what this rank got. None: all ranks.
        batching: that of the loader, if it had one.
        keys: whether the keys of samples are read, where the format has keys.
        accumulate: microbatches a rank of an optimizer step, as `GradSchedule` has it: above 1, `steps` are
            numbers of optimizer steps.
        epoch: for a state of an older release, which does not tell where its steps were: the epoch of the
            step, in place of `steps`, ...
        position: ... the `position` that a state has before it, ...
        global_batch: ... samples (with `batching=Packed`, rows; else batches) of all ranks in a step, ...
        world_size: ... and the number of ranks.
        tail: the loader's rule for the last, incomplete batch of an epoch, where the step is that one.

    Returns:
        a table with a row for each sample, or piece of one, that was delivered: docs/guide/explain.md lists
        its columns.

    Raises:
        ValueError: a state that is damaged or of other data, and what cannot be told, with the reason.
        IndexError: steps that are not known, or were not taken yet.

    Examples:
        >>> dataset = ShardedDataset("images/*.tar", columns=["__key__"])
        >>> with DataLoader(dataset, batch_size=2, shuffle=True) as loader:
        ...     batches = list(loader)
        ...     state = loader.state_dict()
        >>> provenance(state, dataset, 3)["key"].to_pylist() == batches[3]["__key__"]
        True
    """
    run = run_of_state(state, dataset, batching)
    if text := other_transforms(run, may_lack=True):
        warnings.warn(text, stacklevel=2)
    where = (epoch, position, global_batch)
    if steps is not None:
        if where != (None, None, None):
            raise ValueError("say which steps, or epoch=, position= and global_batch=, not both")
        return _table_of_steps(run, steps, accumulate, rank, keys=keys)
    if accumulate != 1:
        raise ValueError("epoch=, position= and global_batch= name one batch: leave accumulate= out")
    place = given_place(run, epoch, position, global_batch, world_size, tail)
    return table_of(run, [NumberedPlace(-1, None, place)], rank, keys=keys)


def given_place(
    run: ExplainedRun,
    epoch: int | None,
    position: int | None,
    global_batch: int | None,
    world_size: int,
    tail: Tail | None,
) -> StepPlace:
    """A place that the user knows otherwise. Raises as `provenance`."""
    if epoch is None or position is None or global_batch is None:
        raise ValueError("say which steps; or all of epoch=, position= and global_batch=")
    if epoch < 0 or position < 0 or global_batch < 1 or world_size < 1 or global_batch % world_size:
        raise ValueError(
            "epoch= and position= must be >= 0, and global_batch= a multiple of world_size= from 1 on, got "
            f"{epoch}, {position}, {global_batch} and {world_size}"
        )
    place = StepPlace(-1, epoch, position, global_batch, world_size, tail or "drop")
    if tail is None and not has_step(run.plan, run.order(epoch), place):
        raise ValueError(
            f"position {position:,} of epoch {epoch} has no complete batch of {global_batch:,}: if it is the "
            'last one of the epoch, say tail="pad", "even" or "uneven", as the loader had it'
        )
    return place


def provenance_of_loader(
    loader: DataLoader[Any, Any], steps: Steps, rank: int | None, keys: bool, accumulate: int
) -> pa.Table:
    """The entry of `DataLoader.provenance`."""
    return _table_of_steps(run_of_loader(loader), steps, accumulate, rank, keys=keys)


def _table_of_steps(
    run: ExplainedRun, steps: Steps, accumulate: int, rank: int | None, *, keys: bool
) -> pa.Table:
    notes = dict[str, None]()
    return table_of(run, numbered_places(run, steps, accumulate, notes), rank, keys=keys, notes=notes)


def table_of(
    run: ExplainedRun,
    places: Iterable[NumberedPlace],
    rank: int | None = None,
    *,
    keys: bool = True,
    notes: Iterable[str] = (),
) -> pa.Table:
    """The table of steps at some places; `notes`: what is to be said of their numbers."""
    notes, tables = dict.fromkeys(notes), []
    if run.dataset.on_error != "raise":
        notes |= {_SKIPPED: None, _EMPTY: None}
    for numbered in places:
        place = numbered.place
        order = run.order_at(place)
        rows = dealt_rows(run.plan, order, place, rank)
        if run.plan.passed and is_passed_over(run.plan, order, place):
            notes[f"step {place.step:,} was passed over, as skip_steps says"] = None
        tables.append(_table(run, numbered, order, rows, notes if keys else None))
    table = pa.concat_tables(tables).unify_dictionaries()
    return table.replace_schema_metadata({NOTES: json.dumps([*notes])})


def _table(
    run: ExplainedRun,
    numbered: NumberedPlace,
    order: EpochOrder,
    rows: DealtRows,
    notes: dict[str, None] | None,
) -> pa.Table:
    """The table of a step; `notes`: gets what could not be read of keys, which None leaves out."""
    place = numbered.place
    component, sample, draw_epoch = _samples(run.plan.dataset, place.epoch, order, rows.position)
    num, seed = len(sample), run.plan.seed
    columns: dict[str, Any] = {
        name: np.zeros(num, np.int64) for name in ("shard_row", "block", "block_row", "offset", "length")
    }
    shard, key, number = [""] * num, list[str | None]([None] * num), np.zeros(num, np.int64)
    matches: list[Any] = [[]] * num
    for which in np.unique(component).tolist():
        index = np.flatnonzero(component == which)
        dataset = run.dataset.sources[which]
        sites = located(dataset, which, sample[index])
        for name, column in columns.items():
            column[index] = getattr(sites, name)
        number[index] = sites.draw_number
        keys, failures = keys_of(dataset, sample[index]) if notes is not None else ([None] * len(index), [])
        if notes is not None:
            notes.update(dict.fromkeys(f"keys that could not be read: {failure}" for failure in failures))
        for row, url, text, match in zip(index.tolist(), sites.shard, keys, sites.matches, strict=True):
            shard[row], key[row], matches[row] = url, text, match
    draws = draws_of(seed, draw_epoch, number)
    named = [[{"shard": url, "shard_row": row} for url, row in match] for match in matches]
    columns |= {
        "step": np.full(num, numbered.number),
        "microbatch": np.full(num, numbered.microbatch or 0),
        "epoch": np.full(num, place.epoch),
        "position": rows.position,
        "rank": rows.rank,
        "row": rows.row,
        "source": component,
        "sample": sample,
        "shard": pa.array(shard, pa.string()).dictionary_encode(),
        "key": key,
        "piece_start": pa.array(rows.begin, pa.int64(), mask=rows.begin == WHOLE),
        "piece_length": pa.array(rows.length, pa.int64(), mask=rows.length == WHOLE),
        "repeat": rows.is_repeat.astype(bool),
        "seed": np.full(num, seed % (1 << 64), np.uint64),
        "draw_epoch": draw_epoch,
        "draw_number": number,
        "draws": pa.FixedSizeListArray.from_arrays(draws.reshape(-1), draws.shape[1]),
        "matches": named,
    }
    return pa.table({field.name: _array(columns[field.name], field.type) for field in _SCHEMA}, _SCHEMA)


def _array(values: Any, kind: pa.DataType) -> pa.Array:
    return values if isinstance(values, pa.Array) else pa.array(values, kind)


def _samples(
    dataset: ShardedDataset | Mixture, epoch: int, order: EpochOrder, positions: Ints
) -> tuple[Ints, Ints, Ints]:
    """Source, index in it, and the source's own epoch, of the samples at some positions."""
    numbers = order.samples(positions)
    if not isinstance(dataset, Mixture):
        return np.zeros(len(numbers), np.int64), numbers, np.full(len(numbers), epoch)
    sizes = np.array([len(component) for component in dataset.sources])
    first = np.cumsum(sizes) - sizes
    component = np.searchsorted(first, numbers, side="right") - 1
    windows, which = np.unique(order.locate(positions)[0], return_inverse=True)
    epochs = [order.source_window(window).epoch for window in windows.tolist()]
    return component, numbers - first[component], np.array([n or 0 for n in epochs], np.int64)[which]


def notes_of(table: pa.Table) -> Sequence[str]:
    """The notes of a table: what it cannot tell."""
    return list(json.loads((table.schema.metadata or {}).get(NOTES, b"[]")))
