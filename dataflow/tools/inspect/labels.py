"""Reading the labels that `dataflow inspect --label` asks for, and nothing else where a format allows it."""

from __future__ import annotations

import math
from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.conversion.values import decode_of, values_of
from dataflow.dataset import ShardedDataset
from dataflow.staging.rows import read_columns

_USUAL_LABELS = ("label", "labels", "cls", "class", "target", "y")


def labels_of(dataset: ShardedDataset, name: str | None) -> tuple[NDArray[Any] | None, str]:
    """Labels of a dataset, and a word on where they are from.

    Args:
        dataset: what to read.
        name: the column; None: read nothing.

    Returns:
        labels [num_samples] by sample number: int64 codes from 0 for integers and text, float64 as they are,
        None where nothing was read; and the word.

    Raises `ValueError` where there is no such column, or it holds more than a number or text a sample.
    """
    if name is None:
        usual = next((column for column in dataset.schema if column in _USUAL_LABELS), None)
        return None, "not read" + (f"; --label {usual} reads them" if usual else "")
    if name not in dataset.schema:
        raise ValueError(f"there is no column {name!r}; there are {', '.join(dataset.schema)}")
    dataset.schema.check([name])
    values = _values_of(dataset, name)
    if values.ndim != 1 or values.dtype.kind not in "biufUSO":
        raise ValueError(f"labels must be one number or text a sample, got column {name!r} {values.dtype}")
    if values.dtype.kind == "f":
        return values.astype(np.float64), f"column {name}"
    distinct, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), f"column {name}, {len(distinct):,} values"


def _values_of(dataset: ShardedDataset, name: str) -> NDArray[Any]:
    """One column of all shards, NaN where a number is missing."""
    source, catalog, spec = dataset.source(), dataset.catalog, dataset.schema[name]
    decode, values = decode_of(name, spec, dataset.codec), list[Any]()
    if decode is None and spec.kind == "bytes" and dataset.codec.columns_are_extensions:
        raise ValueError(f"labels must be one number or text a sample; column {name!r} holds bytes")
    with closing(source.reader):
        for number in range(catalog.num_blocks):
            column = read_columns(source, catalog.block(number), [name])[name]
            values += values_of(column, spec, decode)
    if missing := values.count(None):
        if any(isinstance(value, (str, bytes)) for value in values):
            raise ValueError(f"{missing:,} of {len(values):,} samples have no {name!r}: filter them out")
        values = [math.nan if value is None else value for value in values]
    return np.array(values, object if any(isinstance(value, bytes) for value in values[:1]) else None)
