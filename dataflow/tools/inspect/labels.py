"""Reading the labels that `dataflow inspect --label` asks for, and nothing else where the format allows it.

A column of tables is read by itself, in Parquet without the others; any other by a pass over the data in file
order.
"""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflow.dataset import ShardedDataset
from dataflow.loader import DataLoader
from sharding.formats.arrow.columns import TabularFormat

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
    codec = dataset.catalog.codec()
    if isinstance(codec, TabularFormat):
        values = _table_column(dataset, name)
    else:
        values = _loaded_column(dataset, name)
    if values.ndim != 1 or values.dtype.kind not in "biufUSO":
        raise ValueError(f"labels must be one number or text a sample, got column {name!r} {values.dtype}")
    if values.dtype.kind == "f":
        return values.astype(np.float64), f"column {name}"
    distinct, codes = np.unique(values, return_inverse=True)
    return codes.astype(np.int64), f"column {name}, {len(distinct):,} values"


def _table_column(dataset: ShardedDataset, name: str) -> NDArray[Any]:
    """One column of all shards; of the others no more than lies between."""
    source, catalog = dataset.source(), dataset.catalog
    with closing(source.reader):
        tables = [source.read_table(catalog.block(at), [name]) for at in range(catalog.num_blocks)]
    return np.concatenate([table.column(name).to_numpy() for table in tables])


def _loaded_column(dataset: ShardedDataset, name: str) -> NDArray[Any]:
    """One column by a pass over the data in file order."""
    one = ShardedDataset(
        dataset.catalog.urls[0],
        catalog=dataset.catalog,
        columns=[name],
        storage_options=dataset.storage_options,
    )
    parts = []
    with DataLoader(one, batch_size=4096, shuffle=False, drop_last=False) as loader:
        for batch in loader:
            values = batch[name]
            if isinstance(values, tuple):
                raise ValueError(f"labels must be one number or text a sample; column {name!r} holds bytes")
            parts.append(np.asarray(values))
    return np.concatenate(parts)
