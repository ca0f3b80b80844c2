"""The loader's state in a file: of JSON, or one that `torch.load(weights_only=True)` reads."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_DEPTH = 12


def state_in(named: str) -> dict[str, Any]:
    """The loader's state that is named as FILE, or as FILE:path.to.loader where the file has more.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be read as JSON or by torch, or has no state, or several and no path.
    """
    file, path = Path(named), ""
    if not file.exists():
        name, _, path = named.rpartition(":")
        file = Path(name or named)
    if file.is_dir():
        raise ValueError(
            f"{file} is a folder. Of a distributed checkpoint, torch.distributed.checkpoint.format_utils."
            "dcp_to_torch_save makes a file; else name the file with the loader's state in it"
        )
    if not file.exists():
        raise FileNotFoundError(f"there is no file {file}")
    saved = _loaded(file)
    if path:
        return _checked(_at(saved, path, file), f"{file}:{path}")
    states = [*_states(saved, "", _DEPTH)]
    if len(states) == 1:
        return states[0][1]
    if states:
        names = ", ".join(f"{file}:{where}" for where, _ in states[:8])
        raise ValueError(f"{file} has the states of {len(states)} loaders: name one of {names}")
    raise ValueError(
        f"{file} has no state of a loader over shards: save what loader.state_dict() returns, or name where "
        f"it is, {file}:path.to.loader"
    )


def _loaded(file: Path) -> Any:
    with file.open("rb") as opened:
        begin = opened.read(64).lstrip()
    if begin[:1] in (b"{", b"["):
        try:
            return json.loads(file.read_text("utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} begins as JSON, and is none: {error}") from error
    import torch

    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # of pickle, zipfile or torch: all say that it is no such file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{file} is no JSON, and torch.load(weights_only=True) fails: {reason}") from error


def _at(saved: Any, path: str, file: Path) -> Any:
    value = saved
    for name in path.split("."):
        if isinstance(value, Mapping) and name in value:
            value = value[name]
        elif isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            has = ", ".join(map(str, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise ValueError(f"{file} has no {name!r} of {path!r}: there is {has[:300]}")
    return value


def _checked(value: Any, name: str) -> dict[str, Any]:
    if not _is_state(value):
        raise ValueError(f"{name} is no state of a loader over shards: it is what state_dict() returned")
    return dict(value)


def _is_state(value: Any) -> bool:
    return isinstance(value, Mapping) and {"fingerprint", "checksum", "position"} <= {*value}


def _states(value: Any, where: str, depth: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield all states in what was saved, with their paths."""
    if _is_state(value):
        yield where, dict(value)
        return
    if isinstance(value, Mapping):
        items = [(str(name), item) for name, item in value.items()]
    elif isinstance(value, list | tuple):
        items = [(str(number), item) for number, item in enumerate(value)]
    else:
        return
    for name, child in items if depth else ():
        yield from _states(child, f"{where}.{name}" if where else name, depth - 1)
