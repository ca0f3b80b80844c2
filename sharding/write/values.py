"""Values as writers take them, and what JSON has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

PYTHON_DTYPES = frozenset({"int64", "float64", "bool"})
"""dtypes for which Python has a type of the same values."""
_TEXT = frozenset({str})
_PLAIN = frozenset({str, int, float, bool, type(None)})
_NESTED = frozenset({list, tuple, dict})
_DEEPEST = 100
"""Lists and dicts in one another, at most: where they have no end, neither has who looks at them."""


def plain_value(value: Any) -> Any:
    """Return what a delivered value is here: tensors as arrays, and those of one number as the number."""
    if hasattr(value, "detach") and hasattr(value, "numpy"):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value[()]
    if isinstance(value, np.generic) and value.dtype.name in PYTHON_DTYPES:
        return value.item()
    return value


def json_value(value: Any) -> Any:
    """Return what JSON has for a number, text or array of numpy or torch: the `default` of encoders."""
    found = plain_value(value)
    if isinstance(found, (np.ndarray, np.generic)) and found.dtype.kind in "biufUO":
        found = found.tolist()
    if found is value or isinstance(found, np.generic):
        kind = type(value).__name__
        raise TypeError(f"a value of type {kind} is none of JSON's; tar and Parquet shards hold byte strings")
    return found


def check_keys(value: Any) -> None:
    """Raise `TypeError` for a key that JSON would make text of."""
    if isinstance(value, dict):
        if not _TEXT.issuperset(map(type, value)):
            for key in value:
                if not isinstance(key, str):
                    raise TypeError(f"the key {key!r} is no text, as JSON's keys are")
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    if not _PLAIN.issuperset(map(type, value)):
        for inner in value:
            if type(inner) not in _PLAIN:
                check_keys(inner)


def are_shallow(rows: Sequence[Mapping[Any, Any]]) -> bool:
    """Return whether names are text, and no list or dict holds another: `check_row` passes all."""
    nested = [value for row in rows for value in row.values() if type(value) in _NESTED]
    held = chain.from_iterable([one.values() if type(one) is dict else one for one in nested])
    return _TEXT.issuperset(map(type, {*chain.from_iterable(rows)})) and _NESTED.isdisjoint(map(type, held))


def check_row(row: Mapping[Any, Any]) -> None:
    """Raise `ValueError` for names that are no text, and lists and dicts in one another without an end."""
    for name, value in row.items():
        if not isinstance(name, str):
            raise ValueError(f"a column is called {name!r}, of type {type(name).__name__}: names are text")
        if type(value) in _NESTED:
            _check_depth(name, value, _DEEPEST)


def _check_depth(name: str, value: Any, left: int) -> None:
    if not left:
        raise ValueError(f"column {name!r} holds itself, or is nested over {_DEEPEST} deep: flatten it")
    items = value.values() if type(value) is dict else value
    if not _NESTED.isdisjoint(map(type, items)):
        for item in items:
            if type(item) in _NESTED:
                _check_depth(name, item, left - 1)
