"""Names of loaders in metrics: what their dataset is called, never a URL, and which of them validate."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from dataflow.shard_order import Sharded
from dataflow.telemetry.status.record import Role
from sharding.hub.names import is_hub, parse_name
from sharding.printable import printable_name
from sharding.urls import naming_part

_MOST_LETTERS = 100
_MOST_SOURCES = 3
_INNER = 5
"""Datasets within datasets that are looked into."""
_VALIDATION = {"dev", "eval", "evaluation", "holdout", "test", "testing", "val", "valid", "validation"}
_PARTS = {*_VALIDATION, "train", "training"}
_NUMBERED = re.compile(r"(part|shard|chunk|data|file)?[-_.]?\d+([-_.]?(of)?[-_.]?\d+)*")
"""A file's name that says nothing."""


def checked_name(name: Any) -> str:
    """Return a name that the user gave. `ValueError` if it is none, or a URL: labels end up on dashboards."""
    if not isinstance(name, str) or not name.strip() or "://" in name or len(name) > _MOST_LETTERS:
        raise ValueError(
            f"name must be a text of 1 to {_MOST_LETTERS} letters, no URL, such as 'web', got {name!r}"
        )
    return printable_name(name.strip())


def name_of(dataset: Any) -> str:
    """Return the name of any dataset: the folder that it lies in, its name on the Hub, or its class."""
    if not isinstance(dataset, Sharded):
        return _name_of_class(dataset)
    sources: Any = dataset
    names = dict.fromkeys(map(_name_of_shards, sources.sources[:_MOST_SOURCES]))
    more = len(sources.sources) - _MOST_SOURCES
    return _shortened("+".join(names) + (f" and {more} more" if more > 0 else ""))


def role_of(name: str, *, trains: bool) -> Role:
    """Return what a loader is for. `trains`: whether gradients are computed where its first loop begins.

    Loops that validate mostly begin under `torch.no_grad()`. Those that call it in the loop are known by what
    the dataset is called ("imagenet/val").
    """
    last = re.split(r"[/\-_. ]", name.lower())[-1]
    return "train" if trains and last not in _VALIDATION else "validation"


def _name_of_shards(source: Any) -> str:
    catalog = source.catalog
    if not catalog.num_shards:
        return type(source).__name__
    return name_of_urls([catalog.shard(0).url, catalog.shard(catalog.num_shards - 1).url])


def name_of_urls(urls: Sequence[str]) -> str:
    """Return the name of what lies at the first and the last of some URLs."""
    if is_hub(urls[0]):
        return parse_name(urls[0]).repo
    paths = [_path_of(url) for url in dict.fromkeys(urls)]
    folder = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    parts = [part for part in folder.split("/") if part]
    stem = os.path.basename(paths[0]).partition(".")[0]
    if len(paths) == 1 and not (parts and _NUMBERED.fullmatch(stem.lower())):
        return _shortened(stem or "data")
    if not parts:
        return "data"
    return _shortened("/".join(parts[-2:] if parts[-1].lower() in _PARTS else parts[-1:]))


def _path_of(url: str) -> str:
    """The path of a URL, without protocol, user, host of HTTP, query and fragment."""
    protocol, separator, path = naming_part(url).partition("://")
    if not separator:
        return os.path.abspath(protocol)
    path = re.split(r"[?#]", path)[0]
    authority, _, rest = path.partition("/")
    has_host = protocol.startswith(("http", "ftp", "sftp", "ssh", "smb", "webdav"))
    return f"/{rest}" if has_host or "@" in authority else f"/{path}"


def _name_of_class(dataset: Any) -> str:
    for _ in range(_INNER):
        inner = getattr(dataset, "dataset", None)
        if inner is None:
            break
        dataset = inner
    name = getattr(getattr(dataset, "info", None), "dataset_name", None)
    if not isinstance(name, str) or not name:
        return _shortened(type(dataset).__name__)
    split = str(getattr(dataset, "split", "") or "").partition("[")[0]
    return _shortened(f"{name}/{split}" if split and split != "None" else name)


def _shortened(name: str) -> str:
    return printable_name(name)[:_MOST_LETTERS]
