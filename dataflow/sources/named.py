"""Resolve what a user names to what is read: repositories and splits of folders are looked up.

A glob, a list of files, a catalog pass through; only what must be listed needs `dataflow.sources.hub`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from prefetch.store.retrier import Retrier
from sharding.catalog.listings import is_listing, load_listing
from sharding.formats import has_suffix
from sharding.hub.names import is_hub
from sharding.urls import is_local, local_path


def resolve_source(
    source: Any,
    options: Mapping[str, Any],
    retrier: Retrier,
    *,
    config: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    format: str = "auto",  # noqa: A002
) -> Any:
    """The source with dataset repositories at their commits, or the files of its split.

    Any other source comes back as it is.

    Raises:
        ValueError: `config`, `split` or `revision` where they mean nothing, unknown ones, or none of several.
        DataflowError: the split has no files.
        ShardReadError: the repository or folder cannot be listed.
    """
    items = [source] if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(items, (list, tuple)) or not all(isinstance(one, (str, os.PathLike)) for one in items):
        return source
    texts = [os.fspath(one) for one in items]
    single = len(texts) == 1
    if revision is not None and not all(map(is_hub, texts)):
        raise ValueError(f"revision= is for datasets on the Hub (hf://datasets/...), got {revision!r}")
    if (config is not None or split is not None) and len(texts) != 1:
        raise ValueError("config= and split= are for one repository or folder, not for a list of sources")
    if not any(map(is_hub, texts)):
        if single and (config is not None or split is not None or _has_layout(texts[0])):
            from dataflow.sources.hub import files_of_folder

            return files_of_folder(texts[0], options, retrier, config=config, split=split, format=format)
        return source
    from dataflow.sources.hub import at_commits

    return at_commits(texts, options, retrier, config=config, split=split, revision=revision, format=format)


def _has_layout(text: str) -> bool:
    """Return whether a source is a local folder that holds no shards itself: they may lie as on the Hub."""
    if not is_local(text) or not os.path.isdir(path := local_path(text)):
        return False
    names = os.listdir(path)
    lists = [os.path.join(path, name) for name in names if is_listing(name)]
    lists_shards = any(load_listing(one, None) is not None for one in lists)
    return not lists_shards and not any(
        has_suffix(name) and not name.startswith((".", "_")) for name in names
    )
