"""Values that a dataset lacks, as known before it is read: members of tar, nulls that statistics count."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dataflow.outputs.output import Output
from sharding.blocks import Format
from sharding.catalog.table import Catalog
from sharding.errors import SampleError
from sharding.order.selection import Selection
from sharding.printable import listed

_MOST_BLOCKS = 4096
"""Blocks whose indexes are looked at for samples without any of several alternatives: 0.3 s. A sample behind
them is a bad one when it is read."""


def raise_missing(catalog: Catalog, codec: Format, selection: Selection, outputs: Iterable[Output]) -> None:
    """Raise `SampleError` for the first column that a selected sample is known to lack and may not."""
    for output in outputs:
        for column in output.required if output.lacking else ():
            alternatives = codec.alternatives(column)
            if any(name not in catalog.missing for name in alternatives):
                continue
            missing: Missing | None
            if selection.is_whole and len(alternatives) == 1:
                missing = _first_of_all(catalog, codec, column)
            else:
                missing = _first_selected(catalog, codec, selection, column)
            if missing is not None:
                shard, key, what = missing
                reason = f"column {output.name!r}: {what}; {output.cure}"
                raise SampleError(shard, reason, key=key, stage="plan")


Missing = tuple[str, str | None, str]
"""Shard, the sample's key or number where one is known, what it lacks in words."""


def _first_of_all(catalog: Catalog, codec: Format, column: str) -> Missing:
    """Return the first missing value that indexing found."""
    number, which = catalog.missing[column]
    shard = catalog.shard(number).url
    if codec.columns_are_extensions and catalog.schema[column].kind != "bytes":
        return shard, None, f"its {'folder' if codec.of else 'row of the manifest'} has no value"
    if not which:
        return shard, None, _no_column(codec, column)
    if not codec.has_keys:
        return shard, None, f"{which} are null"
    return shard, which, f"the sample has no member '{which}.{column}', which other samples have"


def _no_column(codec: Format, column: str) -> str:
    if codec.columns_are_extensions:
        return f"no sample has a member {column!r}, which samples of other shards have"
    return "the shard has no such column, which other shards have"


def _first_selected(catalog: Catalog, codec: Format, selection: Selection, column: str) -> Missing | None:
    """Return what the indexes of the blocks in question tell for certain."""
    blocks = np.flatnonzero(selection.num_samples)
    if selection.is_whole:  # of alternatives: before this shard, each sample has one of them
        first_shard = max(catalog.missing[name][0] for name in codec.alternatives(column))
        blocks = blocks[catalog.blocks.shard[blocks] >= first_shard][:_MOST_BLOCKS]
    for number in blocks.tolist():
        block = catalog.block(number)
        if not codec.columns_are_extensions and column not in catalog.schemas[catalog.schema_of(block)]:
            return block.shard.url, None, _no_column(codec, column)
        num_missing = codec.num_missing(block, column)
        if not num_missing:
            continue
        sizes = codec.value_bytes(block, column)
        if sizes is not None:
            rows = selection.rows(number)
            lacking = rows[sizes[rows] < 0]
            if len(lacking):
                key, names = str(block.first_in_shard + int(lacking[0])), codec.alternatives(column)
                none = (
                    f"no member {names[0]!r}" if len(names) == 1 else f"none of the members {listed(names)}"
                )
                return block.shard.url, key, f"the sample has {none}, which other samples have"
        elif selection.num_samples[number] == block.num_samples:
            rows_text = f"{num_missing:,} of {block.num_samples:,} rows from row {block.first_in_shard:,} on"
            return block.shard.url, None, f"{rows_text} are null"
    return None
