"""Tensors, arrays, bytes and tuples as JSON values, and back."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import torch

_TAG = "__dataflow__"


def encoded(value: Any) -> Any:
    """A JSON value for tensors, arrays, bytes, tuples and mappings with other keys than text.

    What JSON and this function do not know is left as it is: such a state is for `torch.save`.
    """
    if isinstance(value, torch.Tensor):
        return {_TAG: "tensor", "value": encoded(value.detach().cpu().numpy())}
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {_TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "value": data}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, bytes):
        return {_TAG: "bytes", "value": base64.b64encode(value).decode()}
    if type(value) is tuple:
        return {_TAG: "tuple", "value": [encoded(item) for item in value]}
    if type(value) is list:
        return [encoded(item) for item in value]
    if type(value) is dict:
        if all(type(key) is str for key in value) and _TAG not in value:
            return {key: encoded(item) for key, item in value.items()}
        return {_TAG: "dict", "value": [[encoded(key), encoded(item)] for key, item in value.items()]}
    return value


def decoded(value: Any) -> Any:
    """Inverse of `encoded`."""
    if type(value) is list:
        return [decoded(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get(_TAG)
    if tag is None:
        return {key: decoded(item) for key, item in value.items()}
    if tag == "tensor":
        return torch.from_numpy(decoded(value["value"]))
    if tag == "array":
        data = bytearray(base64.b64decode(value["value"]))
        return np.frombuffer(data, np.dtype(value["dtype"])).reshape(value["shape"])
    if tag == "bytes":
        return base64.b64decode(value["value"])
    if tag == "tuple":
        return tuple(decoded(item) for item in value["value"])
    return {decoded(key): decoded(item) for key, item in value["value"]}
