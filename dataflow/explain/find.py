"""Find when samples were delivered: at which steps before now, and when each comes next."""

from __future__ import annotations

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dataflow.dataset import ShardedDataset
from dataflow.explain.provenance import NOTES
from dataflow.explain.run import NO_HISTORY, ExplainedRun, run_of_state, run_of_stream, stream_of
from dataflow.joins.join import JoinSide
from dataflow.joins.matches import comparable
from dataflow.mixture import Mixture
from sharding.lengths.batching import Batching
from sharding.lengths.unit_plan import UnitSequence
from sharding.mixture.inverse import places_in_selection, positions_of
from sharding.order.epoch_order import EpochOrder
from sharding.order.windows import ranges, windows_touched
from sharding.plan.batch_plan import BatchPlan
from sharding.plan.history import StepRun
from sharding.plan.passing import PassingBatchPlan, passing
from sharding.printable import listed

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from dataflow.loader import DataLoader

    Ints = NDArray[np.int64]

EPOCHS_AHEAD = 3
"""Epochs in which a sample's next time is looked for, the present one included."""
_SCHEMA = pa.schema(
    {
        "key": pa.string(),
        "source": pa.int32(),
        "sample": pa.int64(),
        "steps": pa.list_(pa.int64()),
        "next_step": pa.int64(),
        "next_epoch": pa.int64(),
        "next_position": pa.int64(),
    }
)


class FoundKeys(NamedTuple):
    """Samples that were asked for, in the order of a dataset's samples; of a mixture, source by source."""

    source: Ints
    sample: Ints
    """Numbers in the source."""
    key: list[str]
    """The key of each; "": they were chosen by an expression or by number."""
    missing: list[str]
    """Keys that no sample has."""


def find(
    state: Mapping[str, Any],
    dataset: ShardedDataset | Mixture,
    samples: Any,
    *,
    on: str = "__key__",
    batching: Batching | None = None,
) -> pa.Table:
    """Return at which steps of a training samples were delivered before a state, and when they come next.

    Args:
        state: what `DataLoader.state_dict` returned.
        dataset: the `ShardedDataset` or `Mixture` that the training had.
        samples: keys, as a list of text, bytes or integers; the path of a file with a key a line; a pyarrow
            expression, as for `ShardedDataset.filter`; or an array of integers, the numbers of samples.
        on: the column of the keys, delivered or not.
        batching: that of the loader, if it had one.

    Returns:
        a table with a row for each sample: key, source of the mixture, number of the sample in it, the steps
        in which it was delivered, and its next step (if loops run to their end and ranks stay as many), epoch
        and position; null: it comes in none of the next epochs. A key that no sample has is a row without a
        sample, one of several samples several rows. `notes_of` says what the table does not know.

    Raises:
        ValueError: a state that is damaged or of other data; steps or lengths that are not known; keys of
            unlike types.

    Examples:
        >>> dataset = ShardedDataset("images/*.tar", columns=["__key__"])
        >>> with DataLoader(dataset, batch_size=2) as loader:
        ...     batches = [list(loader), next(iter(loader))]
        ...     state = loader.state_dict()
        >>> find(state, dataset, [dataset[0]["__key__"], dataset[7]["__key__"]])["steps"].to_pylist()
        [[0, 4], [3]]
    """
    run = run_of_state(state, dataset, batching)
    return table_of_run(run, int(state["epoch"]), int(state["position"]), samples, on)


def find_of_loader(loader: DataLoader[Any, Any], samples: Any, on: str) -> pa.Table:
    """The entry of `DataLoader.find`."""
    stream = stream_of(loader)
    return table_of_run(run_of_stream(stream), stream.epoch, stream.position, samples, on)


def without(dataset: ShardedDataset[Any], samples: Any, on: str) -> ShardedDataset[Any]:
    """The entry of `ShardedDataset.without`: a view. Warns of keys that no sample has."""
    matches = chosen(dataset, samples, on)
    if matches.missing:
        warnings.warn(
            f"{len(matches.missing):,} keys are those of no sample here: {listed(matches.missing[:5])}",
            stacklevel=3,
        )
    is_kept = np.ones(len(dataset), bool)
    is_kept[matches.sample] = False
    return dataset.subset(is_kept)


def chosen(dataset: ShardedDataset | Mixture, samples: Any, on: str = "__key__") -> FoundKeys:
    """Find the samples that keys, a file of keys, an expression or numbers mean; see `find`."""
    components = dataset.sources
    if isinstance(samples, pc.Expression):
        # A view's samples by their places in the dataset.
        hits = [
            places_in_selection(component.selection, *view.locate(np.arange(len(view))))
            for component in components
            for view in [component.filter(samples).selection]
        ]
        number = np.repeat(np.arange(len(hits)), [len(hit) for hit in hits])
        return FoundKeys(number, np.concatenate(hits), [""] * len(number), [])
    if isinstance(samples, np.ndarray) and samples.dtype.kind in "iu":
        ends = np.cumsum([len(component) for component in components])
        if samples.size and not 0 <= int(samples.min()) <= int(samples.max()) < ends[-1]:
            raise ValueError(f"numbers of samples must be in [0, {ends[-1]:,})")
        number = np.searchsorted(ends, samples, side="right")
        return FoundKeys(number, samples - np.append(0, ends)[number], [""] * len(number), [])
    keys = _keys(samples)
    matches = [_with_keys(component, keys, on) for component in components]
    number = np.repeat(np.arange(len(matches)), [len(places) for places, _ in matches])
    places = np.concatenate([places for places, _ in matches])
    which = np.concatenate([which for _, which in matches]).tolist()
    texts = [_text(key) for key in keys.to_pylist()]
    missing = [texts[index] for index in sorted({*range(len(texts))} - {*which})]
    return FoundKeys(number, places, [texts[index] for index in which], missing)


def _keys(samples: Any) -> pa.Array:
    if isinstance(samples, (str, os.PathLike)):
        samples = [line for line in Path(samples).read_text("utf-8").split("\n") if line]
    if not isinstance(samples, Sequence) or not samples:
        raise ValueError(f"samples must be keys, a file of keys, an expression or numbers, got {samples!r}")
    try:
        return comparable(pa.chunked_array([pa.array([*dict.fromkeys(samples)])]))
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise ValueError(f"keys must be all text, all bytes or all integers: {error}") from None


def _with_keys(component: ShardedDataset, targets: pa.Array, on: str) -> tuple[Ints, Ints]:
    """The samples of a source that have one of the keys, and which."""
    side = JoinSide(component.source(), component.selection, on)
    with closing(side.source.reader):
        keys = side.keys() if len(component) else targets[:0]
    if keys.type != targets.type:
        raise ValueError(f"column {on!r} holds {keys.type}, and the keys are {targets.type}")
    which = pc.index_in(keys, targets).fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    places = np.flatnonzero(which >= 0)
    return places, which[places]


def _text(key: Any) -> str:
    return key.decode("utf-8", "backslashreplace") if isinstance(key, bytes) else str(key)


# ---- when -----------------------------------------------------------------------------------------------


def table_of_run(run: ExplainedRun, epoch: int, position: int, samples: Any, on: str) -> pa.Table:
    """The table of samples of a run that stands at a position; see `find`."""
    if run.history is None:
        raise ValueError(NO_HISTORY)
    matches, notes = chosen(run.dataset, samples, on), dict[str, None]()
    sizes = np.array([len(component) for component in run.dataset.sources])
    numbers = (np.cumsum(sizes) - sizes)[matches.source] + matches.sample
    if run.history.known_from:
        notes[f"steps before {run.history.known_from:,} are not known"] = None
    if run.dataset.on_error != "raise":
        notes["on_error= may have left samples out, whose steps are listed all the same"] = None
    seen = defaultdict[int, set[int]](set)
    for stretch in run.history.stretches:
        for number in range(stretch.num_epochs):
            part = stretch._replace(
                epoch=stretch.epoch + number,
                first_step=stretch.first_step + number * stretch.num_steps,
                num_epochs=1,
            )
            for which, step, _ in _steps(run, part, numbers, notes):
                seen[which].add(step)
    coming = _coming(run, epoch, position, numbers, notes)
    rows = [
        (key, component, sample, sorted(seen[index]), *coming.get(index, (None, None, None)))
        for index, (key, component, sample) in enumerate(
            zip(matches.key, matches.source.tolist(), matches.sample.tolist(), strict=True)
        )
    ]
    rows += [(key, None, None, [], None, None, None) for key in matches.missing]
    columns = zip(*rows, strict=True) if rows else [[] for _ in _SCHEMA]
    table = pa.table([pa.array(column, f.type) for column, f in zip(columns, _SCHEMA, strict=True)], _SCHEMA)
    return table.replace_schema_metadata({NOTES: json.dumps([*notes])})


def _dealt(run: ExplainedRun, part: StepRun, num_items: int) -> BatchPlan:
    """The batches of a part of an epoch, as all ranks had them."""
    plan = BatchPlan(
        num_items=num_items,
        batch_size=part.global_batch // part.world_size,
        rank=0,
        world_size=part.world_size,
        tail=part.tail,
        start=part.position,
        wraps=run.plan.planner is None,
    )
    return passing(plan, [piece for piece in run.plan.passed if piece.epoch == part.epoch])


def _steps(
    run: ExplainedRun, part: StepRun, numbers: Ints, notes: dict[str, None]
) -> Iterator[tuple[int, int, int]]:
    """Yield an index in `numbers`, a step with that sample and its item, of some steps of one epoch."""
    order = run.order(part.epoch)
    end = part.position + part.num_steps * part.global_batch
    which, items, num_items = _items(run, order, numbers, part.position, end, notes)
    dealt = _dealt(run, part, num_items)
    num_steps = min(part.num_steps, dealt.num_steps_global)
    step = (items - part.position) // part.global_batch
    taken = (items >= part.position) & (step < num_steps)
    if isinstance(dealt, PassingBatchPlan):
        taken &= ~dealt.is_passed(items)
    steps = (part.first_step + step[taken]).tolist()
    yield from zip(which[taken].tolist(), steps, items[taken].tolist(), strict=True)
    last = dealt.num_steps_global - 1
    if dealt.wraps and 0 <= last < num_steps and (padded := dealt.num_padded_global):
        # The last batch was filled up with the first items of the epoch.
        again = np.arange(num_items, num_items + padded) % num_items
        if order.known_from:
            again = np.where(again < order.known_from, order.known_from + again, again)
        which, items, _ = _items(run, order, numbers, order.known_from, int(again.max()) + 1, notes)
        for index, item in zip(which.tolist(), items.tolist(), strict=True):
            if item in again:
                yield index, part.first_step + last, item


def _items(
    run: ExplainedRun, order: EpochOrder, numbers: Ints, begin: int, end: int, notes: dict[str, None]
) -> tuple[Ints, Ints, int]:
    """The places of samples among what is dealt out of an epoch: index, item, and the number of all items."""
    planner, known_from, num_items = run.plan.planner, order.known_from, _num_items(run, order, begin)
    if planner is None:
        places = *positions_of(order, numbers, begin, min(end, num_items)), num_items
    else:
        sequence = planner.sequence(order, begin)
        known_from = sequence.begin
        which, positions = positions_of(order, numbers)
        index, units = units_of(sequence, positions)
        places = which[index], units, num_items
    if begin < known_from:
        notes[f"epoch {order.epoch} is known from position {known_from:,} on only"] = None
    return places


def _num_items(run: ExplainedRun, order: EpochOrder, begin: int) -> int:
    """The number of samples, or units, of an epoch."""
    if run.plan.planner is None:
        return order.num_samples
    sequence = run.plan.planner.sequence(order, begin)
    return sequence.num_units - (sequence.num_short if run.plan.tail == "drop" else 0)


def units_of(sequence: UnitSequence, positions: Ints) -> tuple[Ints, Ints]:
    """The inverse of `UnitSequence.take`, as far as units are known.

    Returns an index in `positions`, and a unit that has a part of the sample there, two int64 [m]: by index
    and then unit. A sample that is cut is in several units, one that nothing is delivered of in none.
    """
    pairs = [(np.empty(0, np.int64), np.empty(0, np.int64))]
    for number, ids in windows_touched(np.searchsorted(sequence.bounds, positions, side="right") - 1):
        first, unit = int(sequence.bounds[number]), sequence.first_unit[number : number + 2]
        if len(unit) < 2 or unit[0] == unit[1]:  # not known, or nothing is delivered of it
            continue
        index, plan = np.arange(len(positions))[ids], sequence.units(number)
        units = int(unit[0]) + np.repeat(np.arange(len(plan)), np.diff(plan.first))
        by_position = np.argsort(plan.segments.position, kind="stable")
        keys = plan.segments.position[by_position]
        begin, end = (np.searchsorted(keys, positions[ids] - first, side=side) for side in ("left", "right"))
        pairs.append((np.repeat(index, end - begin), units[by_position[ranges(begin, end - begin)]]))
    which, units = (np.concatenate(parts) for parts in zip(*pairs, strict=True))
    once = np.unique(np.stack((which, units)), axis=1)
    return once[0], once[1]


def _coming(
    run: ExplainedRun, epoch: int, position: int, numbers: Ints, notes: dict[str, None]
) -> dict[int, tuple[int | None, int, int]]:
    """The next step, epoch and position of samples, by their index."""
    assert run.history is not None
    plan, last = run.plan, run.history.stretches[-1] if run.history.stretches else None
    group = (last.global_batch, last.world_size, last.tail) if last else None
    first_step, coming = run.history.num_steps, dict[int, tuple[int | None, int, int]]()
    for number in range(epoch, epoch + EPOCHS_AHEAD):
        left = np.setdiff1d(np.arange(len(numbers)), [*coming])
        if not len(left):
            return coming
        try:
            order = run.order(number)
        except ValueError:  # a mixture without end has one epoch
            break
        start = position if number == epoch else 0
        end = min(order.num_samples, start + 4 * EPOCHS_AHEAD * sum(map(len, run.dataset.sources)))
        size, world_size, tail = group or (1, 1, "uneven")
        num_steps = -(-(end - start) // size) if plan.planner is None else 1 << 40
        part = StepRun(first_step, number, start, size, world_size, tail, 1, num_steps)
        steps = sorted((index, step, item) for index, step, item in _steps(run, part, numbers[left], notes))
        for index, step, item in steps:
            coming.setdefault(int(left[index]), (step if group else None, number, item))
        first_step += _dealt(run, part, _num_items(run, order, start)).num_steps_global
    return coming
