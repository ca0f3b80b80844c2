"""What the tests of TFRecord and ArrayRecord need: fixtures, and what the owners' readers gave."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from formats_kit import rows_of

from sharding.blocks import Columns
from sharding.byte_lists import ByteLists, list_items

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"


def fixture(folder: str, name: str) -> bytes:
    """The bytes of a file as its owner wrote it."""
    path = FIXTURES / folder / name
    return path.read_bytes() if path.exists() else gzip.decompress(Path(f"{path}.gz").read_bytes())


@cache
def expected(folder: str, what: str) -> list[Any]:
    """The records of a kind as TensorFlow parsed them: values by feature, of feature lists by step."""
    records = json.loads((FIXTURES / folder / "expected.json").read_text())[what]
    if what == "raw":
        return [bytes.fromhex(record) for record in records]
    return [{name: _plain(values) for name, values in record.items()} for record in records]


def _plain(values: dict[str, Any]) -> list[Any]:
    (kind, listed) = next(iter(values.items()))
    if kind == "steps":
        return [_plain(step) for step in listed]
    if kind == "float":
        return np.array(listed, np.float32).tolist()
    return [bytes.fromhex(one) for one in listed] if kind == "bytes" else listed


def values_in(blocks: list[Columns]) -> list[dict[str, Any]]:
    """The samples of decoded blocks as lists of values by feature, as `expected` has them."""
    rows = list[dict[str, Any]]()
    for columns in blocks:
        lists = {name: _unpacked(one) for name, one in columns.items() if isinstance(one, ByteLists)}
        others = {name: one for name, one in columns.items() if name not in lists}
        for i, row in enumerate(rows_of([others]) if others else [{} for _ in next(iter(lists.values()))]):
            row |= {name: values[i] for name, values in lists.items()}
            there = {name: value for name, value in row.items() if value is not None}
            rows.append(
                {name: value if isinstance(value, list) else [value] for name, value in there.items()}
            )
    return rows


def _unpacked(column: ByteLists) -> list[list[bytes] | None]:
    has = column.lengths >= 0
    counts, starts, lengths = list_items(column.buffer, column.starts[has])
    items = iter([column.buffer[a : a + n].tobytes() for a, n in zip(starts, lengths, strict=True)])
    each = iter([[next(items) for _ in range(count)] for count in counts])
    return [next(each) if there else None for there in has]
