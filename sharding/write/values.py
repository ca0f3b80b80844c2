"""Values as writers take them, and what JSON has for them."""

from __future__ import annotations

from typing import Any

import numpy as np

PYTHON_DTYPES = frozenset({"int64", "float64", "bool"})
"""dtypes for which Python has a type of the same values."""


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
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is no text, as JSON's keys are")
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for inner in value:
        if isinstance(inner, (dict, list, tuple)):
            check_keys(inner)
