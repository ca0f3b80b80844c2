"""Classes that no name finds, such as local ones, between a process and those that were forked from it.

A copy of such a class is another class, and `isinstance` says so. But a fork has the very objects of the
moment, at the same addresses: there such a class is found again, in both directions. One that was made later
goes by value.
"""

from __future__ import annotations

import io
import pickle
import sys
import weakref
from functools import partial
from typing import Any

import cloudpickle

_found: dict[tuple[int, str, str], weakref.ref[type]] = {}


def forked_class(cls: type, is_fork: bool) -> tuple[Any, ...] | None:
    """Reduce a class for a fork of this process, or for the one that this is a fork of; None: as ever."""
    if not is_fork or _by_name(cls.__module__, cls.__qualname__) is cls:
        return None
    return _class_of, (id(cls), cls.__module__, cls.__qualname__, cloudpickle.dumps(cls))


def dumps_to_fork(obj: Any) -> bytes:
    """A plain pickle for a process that was forked from this one."""
    try:
        return pickle.dumps(obj, pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError):
        file = io.BytesIO()
        _ToFork(file, pickle.HIGHEST_PROTOCOL).dump(obj)
        return file.getvalue()


class _ToFork(cloudpickle.Pickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        reduction = forked_class(obj, is_fork=True) if isinstance(obj, type) else None
        return super().reducer_override(obj) if reduction is None else reduction


def _by_name(module: str, name: str) -> Any:
    obj: Any = sys.modules.get(module)
    for part in name.split("."):
        obj = getattr(obj, part, None)
    return obj


def _class_of(address: int, module: str, name: str, value: bytes) -> Any:
    key = address, module, name
    kind = _found.get(key, partial(_search, key))()
    return pickle.loads(value) if kind is None else kind


def _search(key: tuple[int, str, str]) -> type | None:
    waiting: list[type] = [object]
    seen = set[type]()
    while waiting:
        kind: type
        for kind in type.__subclasses__(waiting.pop()):
            if (id(kind), kind.__module__, kind.__qualname__) == key:
                _found[key] = weakref.ref(kind)
                return kind
            if kind not in seen:
                seen.add(kind)
                waiting.append(kind)
    return None
