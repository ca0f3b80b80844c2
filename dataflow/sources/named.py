"""Resolve what a user names to what is read: repositories and splits of folders are looked up.

A glob, a list of files, a catalog pass through; only what must be listed needs `dataflow.sources.hub`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from dataflow.outputs.output import Output
from dataflow.outputs.resolve import resolve_outputs
from dataflow.sources.listing.shards import shards_in
from dataflow.staging.source import Source
from prefetch.store.retrier import Retrier
from prefetch.store.small_files import SmallFiles
from sharding.blocks import Format
from sharding.catalog.listings import is_listing, load_listing
from sharding.formats import has_suffix
from sharding.hub.names import is_hub
from sharding.order.selection import Selection
from sharding.urls import is_local, local_path

if TYPE_CHECKING:
    from dataflow.sources.energon.folder import EnergonDataset


class Folder(Struct, frozen=True, kw_only=True):
    """A source with the arguments of the user, those changed that a description in its folder tells."""

    source: Any
    format: Any
    config: str | None
    split: str | None
    columns: Any
    decode: object
    cameras: Mapping[str, Any] = {}
    energon: EnergonDataset | None = None
    """The description, if it is one of Megatron-Energon."""

    def resolver(self, codec: Format) -> Callable[..., tuple[Output, ...]]:
        """Return what makes outputs of a schema."""
        return partial(
            resolve_outputs, columns=self.columns, decode=self.decode, codec=codec, cameras=self.cameras
        )

    def selection(self, source: Source) -> Selection:
        """The samples that a description of Megatron-Energon counts in; closes the reader of `source`."""
        from dataflow.sources.joins import JoinSide

        assert self.energon is not None
        with closing(source.reader):
            return self.energon.selection(
                source.catalog, lambda apart: JoinSide(source, apart, "__key__").keys().to_pylist()
            )


def resolve_folder(
    source: Any,
    format: Any,  # noqa: A002
    config: str | None,
    split: str | None,
    columns: Any,
    decode: object,
    *,
    options: Mapping[str, Any],
    retrier: Retrier,
) -> Folder:
    """Look at files beside the shards: a source may be a folder of LeRobot or of Megatron-Energon.

    Raises `ValueError` for what is not read, `ShardError` for files that cannot be read or are damaged.
    """
    from dataflow.sources.energon.folder import fields_of, find_energon

    told = Folder(source=source, format=format, config=config, split=split, columns=columns, decode=decode)
    files = SmallFiles(options, retrier)
    if format == "lerobot":
        from dataflow.sources.lerobot import open_lerobot

        robot = open_lerobot(source, options, files)
        return structs.replace(told, source=robot.data, format="parquet", cameras=robot.cameras)
    found = find_energon(source, files, format=format, config=config, split=split)
    if found is None:
        return told
    if columns is None:
        columns, rules = fields_of(found, files)
        if rules and (decode == "auto" or isinstance(decode, Mapping)):
            decode = {**rules, **(decode if isinstance(decode, Mapping) else {})}
    return Folder(
        source=found.shards,
        format="tar",
        config=None,
        split=None,
        columns=columns,
        decode=decode,
        energon=found,
    )


def resolve_source(
    source: Any,
    options: Mapping[str, Any],
    retrier: Retrier,
    *,
    config: str | None = None,
    split: str | None = None,
    revision: str | int | None = None,
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
        raise ValueError(
            f"revision= is for datasets on the Hub (hf://datasets/...) and for tables, got {revision!r}"
        )
    if (config is not None or split is not None) and len(texts) != 1:
        raise ValueError("config= and split= are for one repository or folder, not for a list of sources")
    if not any(map(is_hub, texts)):
        if single and (config is not None or split is not None or _has_layout(texts[0], format)):
            from dataflow.sources.hub import files_of_folder

            return files_of_folder(texts[0], options, retrier, config=config, split=split, format=format)
        return source
    from dataflow.sources.hub import at_commits

    return at_commits(
        texts,
        options,
        retrier,
        config=config,
        split=split,
        revision=str(revision) if revision else None,
        format=format,
    )


def _has_layout(text: str, format: str) -> bool:  # noqa: A002
    """Return whether a source is a local folder that holds no shards itself: they may lie as on the Hub."""
    if not is_local(text) or not os.path.isdir(path := local_path(text)):
        return False
    names = os.listdir(path)
    lists = [os.path.join(path, name) for name in names if is_listing(name)]
    lists_shards = any(load_listing(one, None) is not None for one in lists)
    files = [name for name in names if os.path.isfile(os.path.join(path, name)) or has_suffix(name)]
    return not lists_shards and not shards_in(files, format)
