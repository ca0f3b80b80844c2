"""Values as writers take them, and what JSON has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from sharding.errors import SampleError

PYTHON_TYPES = (np.bool_, np.float64, np.int64, np.longlong)
"""Numbers of numpy for which Python has a type of the same values."""
_TEXT = frozenset({str})
MASKED = "a masked array has no type of its own: fill it"
PLAIN = frozenset({str, int, float, bool, type(None)})
NESTED = frozenset({list, tuple, dict})
DEEPEST = 100
"""Lists and dicts in one another, at most: where they have no end, neither has who looks at them."""
ENDLESS = f"holds itself, or is nested over {DEEPEST} deep: flatten it"


def plain_value(value: Any) -> Any:
    """Return what a delivered value is here: tensors as arrays, and those of one number as the number."""
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(MASKED)
        value = value if value.ndim else value[()]
    return value.item() if isinstance(value, PYTHON_TYPES) else value


def column_of(rows: Sequence[Mapping[str, Any] | None], name: str) -> list[Any]:
    """Return the values that rows have under a name; None where there is none."""
    try:
        return list(map(itemgetter(name), rows))  # type: ignore[arg-type]
    except (KeyError, TypeError):
        return [None if row is None else row.get(name) for row in rows]


def json_value(value: Any) -> Any:
    """Return what JSON has for a number, text or array of numpy or torch: the `default` of encoders."""
    result = plain_value(value)
    if isinstance(result, (np.ndarray, np.generic)) and result.dtype.kind in "biufUO":
        result = result.tolist()
    if result is value or isinstance(result, np.generic):
        kind = type(value).__name__
        raise TypeError(f"a value of type {kind} is none of JSON's; tar and Parquet shards hold byte strings")
    return result


def check_keys(value: Any) -> None:
    """Raise `TypeError` for a key that JSON would make text of."""
    if isinstance(value, dict):
        if not _TEXT.issuperset(map(type, value)) and (bad := [k for k in value if not isinstance(k, str)]):
            raise TypeError(f"the key {bad[0]!r} is no text, as JSON's keys are")
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    if not PLAIN.issuperset(map(type, value)):
        for inner in value:
            if type(inner) not in PLAIN:
                check_keys(inner)


def check_rows(url: str, rows: Sequence[Mapping[Any, Any]], first: int = 0) -> None:
    """Raise `SampleError` for the first row that `check_row` refuses; `first` is the number of the first."""
    for number, row in enumerate(rows, first):
        try:
            check_row(row)
        except ValueError as error:
            raise SampleError(url, str(error), key=str(row.get("__key__", number)), stage="write") from error


def check_row(row: Mapping[Any, Any]) -> None:
    """Raise `ValueError` for names that are no text, for masks, and for lists and dicts without an end."""
    for name, value in row.items():
        if not isinstance(name, str):
            raise ValueError(f"a column is called {name!r}, of type {type(name).__name__}: names are text")
        if type(value) in NESTED and not has_an_end(value):
            raise ValueError(f"column {name!r} {ENDLESS}")
        if isinstance(value, np.ma.MaskedArray):
            raise ValueError(f"column {name!r}: {MASKED}")


def has_an_end(value: Any, left: int = DEEPEST) -> bool:
    """Return whether lists and dicts are in one another not over `left` deep; other values have an end."""
    items = value.values() if type(value) is dict else value if type(value) in NESTED else ()
    return NESTED.isdisjoint(map(type, items)) or (left > 1 and all(has_an_end(i, left - 1) for i in items))
