"""The selections behind the views of a `ShardedDataset`: by index, by hash, by condition; and by class.

Only a condition on rows reads data: the columns it looks at, of the blocks that their statistics do not rule
out. One on the members of tar's samples is decided by the catalog. Formats that are no tables have rows of
numbers, text and bytes; whole blocks of them are read, unless what is asked for lies far apart.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from torch import Tensor

from dataflow.outputs.output import Output
from dataflow.ragged import Ragged
from dataflow.staging.block_source import BlockSource
from dataflow.staging.rows import read_columns
from sharding.arrow_arrays import bits, bool_array, number_array
from sharding.blocks import Block, Format, Masked, Spans
from sharding.catalog.predicate import (
    Predicate,
    blocks_that_may_match,
    member_schema,
    member_table,
)
from sharding.catalog.reading import read_block
from sharding.catalog.schema import NO_SCHEMA
from sharding.catalog.table import Catalog
from sharding.formats.arrow.columns import TabularFormat
from sharding.formats.arrow.schema import arrow_type, features_of
from sharding.lengths.kept import KeptLengths, LengthsFile
from sharding.mixture.shares import Weight, exact_numbers
from sharding.order.balanced import Balance, drawn_of_classes
from sharding.order.selection import MOST_DRAWN, Selection
from sharding.spans import gathered

_THREADS = 16
_SAMPLES_AT_ONCE = 1 << 20
"""Number of samples whose members are looked at together: a condition costs more than a small block has."""

_LABELS_AT_ONCE = 1 << 12


def picked(selection: Selection, indices: Any) -> Selection:
    """The samples at a slice, at strictly ascending integers, or where an array of bool says so."""
    if isinstance(indices, slice):
        start, stop, step = indices.indices(len(selection))
        if step < 1:
            raise ValueError(f"samples keep their order, so a slice must ascend; got {indices}")
        if step == 1:
            return selection.between(start, max(start, stop))
        if len(range(start, stop, step)) > MOST_DRAWN:
            raise MemoryError(f"at most {MOST_DRAWN:,} are picked one by one")
        return selection.at(np.arange(start, stop, step))
    chosen = np.asarray(indices)
    if chosen.dtype == bool:
        if chosen.shape != (len(selection),):
            raise ValueError(f"a mask must have one bool for each of {len(selection)} samples")
        return selection.at(np.flatnonzero(chosen))
    if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind not in "iu"):
        raise ValueError(f"indices must be a slice or a list of integers, got {chosen.ndim}-D {chosen.dtype}")
    return selection.at(_ascending(chosen.astype(np.int64), len(selection)))


def _ascending(indices: NDArray[np.int64], total: int) -> NDArray[np.int64]:
    if ((indices < -total) | (indices >= total)).any():
        raise IndexError(f"an index lies outside a dataset of {total} samples")
    indices = np.where(indices < 0, indices + total, indices)
    if (np.diff(indices) <= 0).any():
        cure = "sort them with numpy.unique; shuffling is the loader's, repeating is a Mixture's"
        raise ValueError(f"samples keep their order, so indices must ascend and not repeat: {cure}")
    return indices


def matching(source: BlockSource, selection: Selection, expression: Any) -> Selection:
    """The samples for which a pyarrow expression is true."""
    codec, catalog = source.format, source.catalog
    if codec.columns_are_extensions:
        return _with_members(source, selection, expression)
    if not isinstance(codec, TabularFormat):
        return _with_values(source, selection, expression)

    others = _schemas(catalog, codec)

    @lru_cache(maxsize=64)
    def bound(schema: pa.Schema) -> Predicate:
        return Predicate(expression, schema, others)

    def predicate_of(block: Block) -> Predicate:
        return bound(codec.schema(bytes(block.footer)).remove_metadata())

    def matches(number: int) -> NDArray[np.bool_]:
        block = catalog.block(number)
        condition = predicate_of(block)
        stored = condition.stored_columns
        if not stored:
            return condition.holds(pa.table({"": pa.nulls(block.num_samples)}))
        data = read_block(block, source.reader.read_into, codec.select(block, stored))
        return condition.holds(codec.table(block, data, stored))

    # A condition that does not fit is an error before any read.
    try:
        first = predicate_of(catalog.block(0))
    except ValueError:
        catalog.schema.check(name for name in catalog.schema.conflicts if name in str(expression))
        raise
    catalog.schema.check(first.named)
    return _where(
        selection.of_blocks(blocks_that_may_match(catalog, codec, expression, predicate_of)), matches
    )


def _where(left: Selection, matches: Callable[[int], NDArray[np.bool_]]) -> Selection:
    """The samples that match; `matches` tells it of all samples of a block, and is called in threads."""
    blocks = np.flatnonzero(left.num_samples).tolist()
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dataflow-filter") as pool:
        masks = dict(zip(blocks, pool.map(matches, blocks), strict=True))
    return left.where(lambda block, rows: masks[block][rows])


def _schemas(catalog: Catalog, codec: TabularFormat) -> list[pa.Schema]:
    """Return the schemas of the catalog where there are several, each by its first shard."""
    if len(catalog.schemas) < 2:
        return []
    _, shards = np.unique(catalog.shard_schemas, return_index=True)
    with_blocks = (shard for shard in sorted(shards) if catalog.shard_schemas[shard] != NO_SCHEMA)
    firsts = (int(catalog.first_block[shard]) for shard in with_blocks)
    return [codec.schema(bytes(catalog.block(first).footer)) for first in firsts]


def _with_values(source: BlockSource, selection: Selection, expression: Any) -> Selection:
    """The samples whose numbers, text or bytes an expression is true of, in a format that is no table."""
    codec, catalog = source.format, source.catalog
    types = {
        name: arrow_type(spec)
        for name, spec in catalog.schema.items()
        if spec.kind in ("text", "bytes") or (spec.kind == "fixed" and not spec.shape)
    }
    if not types:
        others = "those of Parquet, Arrow, JSONL, MDS, LitData, TFRecord, ArrayRecord and tar have"
        raise ValueError(f"this dataset of format {codec.name!r} has no columns to filter by; {others}")
    condition = Predicate(expression, pa.schema(types))
    catalog.schema.check(condition.columns)

    def matches(number: int) -> NDArray[np.bool_]:
        columns = read_columns(source, block := catalog.block(number), condition.columns)
        try:
            arrays = {name: column_array(column).cast(types[name]) for name, column in columns.items()}
        except pa.ArrowException as error:
            raise block.corrupt(f"the filter {expression} cannot look at it: {error}") from error
        return condition.holds(pa.table(arrays))

    return _where(selection, matches)


def column_array(column: Any) -> pa.Array:
    """The values of a decoded `Column` of numbers, or of bytes or text, which come as large binary."""
    if isinstance(column, Masked):
        return pa.array(column.values, mask=column.lacks != 0)
    if not isinstance(column, Spans):
        return bool_array(column) if column.dtype == bool else number_array(column)
    lengths = np.maximum(column.lengths, 0)
    contents = gathered(column.buffer.view(np.uint8), column.starts, lengths)
    valid = None if (column.lengths >= 0).all() else bits(column.lengths >= 0)
    buffers = [valid, pa.py_buffer(np.append(0, np.cumsum(lengths))), pa.py_buffer(contents)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(lengths), buffers)


def _with_members(source: BlockSource, selection: Selection, expression: Any) -> Selection:
    """The samples for which an expression of members' sizes and known values is true; reads nothing."""
    codec, catalog = source.format, source.catalog
    try:
        schema = member_schema(catalog, codec)
        condition = Predicate(expression, schema)
    except ValueError as error:
        asks = "it may ask which members or files there are, field('txt').is_valid(), and their bytes"
        raise ValueError(f"{error}; {asks}, field('jpg', 'size') > 1000") from error
    masks: dict[int, NDArray[np.bool_]] = {}
    members = pa.schema([schema.field(name) for name in condition.fields])
    numbers = np.flatnonzero(selection.num_samples)
    million = np.cumsum(catalog.blocks.num_samples[numbers]) // _SAMPLES_AT_ONCE
    for group in np.split(numbers, np.flatnonzero(np.diff(million)) + 1) if len(numbers) else ():
        block_numbers = group.tolist()
        blocks = [catalog.block(number) for number in block_numbers]
        holds = condition.holds(member_table(codec, blocks, members))
        ends = np.cumsum([block.num_samples for block in blocks])
        masks.update(zip(block_numbers, np.split(holds, ends[:-1]), strict=True))
    return selection.where(lambda block, rows: masks[block][rows])


def features_by_name(outputs: Sequence[Output], catalog: Catalog, codec: Format) -> dict[str, Any]:
    """The stored features of columns that are each made of one stored column, by the names delivered."""
    if isinstance(codec, TabularFormat) and catalog.num_blocks:
        stored = features_of(codec.schema(bytes(catalog.block(0).footer)))
    else:
        stored = {name: json.loads(spec.feature) for name, spec in catalog.schema.items() if spec.feature}
    stored = dict(_flattened(stored))
    named = {item.name: item.sources[0] for item in outputs if len(item.sources) == 1 and not item.suffix}
    return {name: stored[source] for name, source in named.items() if source in stored}


def _flattened(features: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield features, and behind each of a struct those of its fields, by names with dots."""
    for name, feature in features.items():
        yield prefix + name, feature
        if isinstance(feature, Mapping) and "_type" not in feature:
            yield from _flattened(feature, f"{prefix}{name}.")


def balance_of(dataset: Any, by: str, weights: Mapping[Any, Weight] | Sequence[Weight] | None) -> Balance:
    """The balance of a `ShardedDataset` by a column, as `ShardedDataset.balanced` says it."""
    labels = dataset.select([by])
    labels.transform = labels.batch_transform = None
    names, first, classes, size = np.unique(
        _kept_classes(labels, by), return_index=True, return_inverse=True, return_counts=True
    )
    if weights is None:
        weights = [1] * len(names)
    elif isinstance(weights, Mapping):
        weights = _in_order(weights, _labels(labels, by, first).tolist())
    if len(weights) != len(names):
        raise ValueError(f"column {by!r} has {len(names):,} classes, and weights {len(weights):,} numbers")
    exact = exact_numbers(weights)
    drawn = drawn_of_classes(len(dataset), exact)
    if never := [number for number, weight in enumerate(exact) if weight and not drawn[number]]:
        label = _labels(labels, by, first[never[:1]]).tolist()[0]
        raise ValueError(
            f"{len(never):,} classes with a weight, such as {label!r} of {size[never[0]]:,} samples, would "
            f"not come in an epoch of {len(dataset):,} samples: raise their weights, or give them 0"
        )
    return Balance(classes.astype(np.int32), drawn)


def _in_order(weights: Mapping[Any, Weight], labels: Sequence[Any]) -> list[Weight]:
    """The weights of classes, one a label."""
    if unknown := [label for label in weights if label not in labels]:
        raise ValueError(f"weights name {unknown[0]!r}, which is no class; the first are {labels[:10]}")
    if missing := [label for label in labels if label not in weights]:
        raise ValueError(f"weights lack class {missing[0]!r}; 0 leaves a class out")
    return [weights[label] for label in labels]


def _kept_classes(dataset: Any, by: str) -> NDArray[np.int32]:
    """The class of each sample, numbered in the order of labels; from the user's cache folder, or read."""
    if not len(dataset):
        raise ValueError("there are no samples to balance")
    (output,) = dataset.outputs
    marks = ("classes", output.description(), repr(output.default), *output.sources, dataset.fingerprint())
    catalog, path = dataset.catalog.fingerprint(), dataset.catalog_path
    file = LengthsFile(num_samples=len(dataset), catalog=catalog, facts=marks, catalog_path=path)
    cache = KeptLengths([file])
    if output.function or not cache.is_complete:
        _labels(dataset, by, np.zeros(1, np.int64))  # raises for what is no label, before all are read
        labels = _labels(dataset, by, np.arange(len(dataset)))
        classes = np.unique(labels, return_inverse=True)[1]
        if output.function:  # which nothing tells from another one
            return classes.astype(np.int32)
        cache.forget()
        cache.note(np.arange(len(dataset)), classes)
        cache.save()
    return cache.lengths


def _labels(dataset: Any, by: str, samples: NDArray[np.int64]) -> NDArray[Any]:
    """The labels of some samples, of integers or as objects, [n]."""
    parts = np.array_split(samples, -(-len(samples) // _LABELS_AT_ONCE))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="dataflow-labels") as pool:
        labels = np.concatenate([*pool.map(lambda part: _as_array(dataset[part][by]), parts)])
    if labels.dtype.kind not in "biu" and not all(isinstance(label, (str, bytes)) for label in labels):
        raise ValueError(
            f"classes are integers, text or bytes; column {by!r} is {dataset.outputs[0].description()}"
        )
    return labels


def _as_array(column: Any) -> NDArray[Any]:
    if isinstance(column, Tensor) and column.dim() == 1:
        return column.numpy()
    rows = [row.numpy().tobytes() for row in column.rows()] if isinstance(column, Ragged) else [*column]
    labels = np.empty(len(rows), object)
    labels[:] = rows
    return labels
