"""Say what a source means: one ordered table, whose rows are asked in turn until one claims it.

A row is asked only where the kind of source and `format=` are its own, and looked up by its dotted name only
where a cheap look says that it may be meant. Names come first, then what lies in a folder, which is listed
once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from msgspec import Struct, structs

from dataflow.sources.listing.expand import (
    DELTA_LOG,
    ICEBERG_METADATA,
    LooksUp,
    checked_text,
    expand,
)
from dataflow.sources.listing.places import Places
from dataflow.sources.listing.shards import shards_in
from sharding.blocks import Format
from sharding.catalog.build import is_catalog
from sharding.catalog.listings import is_listing
from sharding.catalog.table import Catalog
from sharding.errors import ShardReadError
from sharding.formats import has_suffix
from sharding.hub.names import is_hub
from sharding.urls import file_name, is_glob, is_http, is_local

TABLES_OF_FILES = ("csv", "tsv")
"""Endings of tables that are no shards."""
MANIFESTS = tuple(f"metadata.{ending}" for ending in (*TABLES_OF_FILES, "jsonl", "parquet"))
"""Names by which a manifest is found in the folder of its files, as Hugging Face finds it."""


KINDS = {
    "images": ("jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp"),
    "sounds": ("wav", "flac", "mp3", "ogg", "opus", "m4a"),
    "videos": ("mp4", "mov", "mkv", "webm", "avi"),
}
"""Endings of files that are samples under `format="auto"`; images are those of torchvision."""
KIND_OF = {ending: kind for kind, endings in KINDS.items() for ending in endings}
MEDIA_ENDINGS = tuple(f".{ending}" for ending in KIND_OF)
KIND_ENDING = re.compile(rf"\.({'|'.join(KIND_OF)}|{{({'|'.join(KIND_OF)}|,)+}})$")
"""Ends names and patterns of such files, braces among them."""


class SourceArguments(Struct, frozen=True, kw_only=True):
    """The arguments that a user gives with a source; see `ShardedDataset`."""

    format: str | Format = "auto"
    catalog: Any = None
    config: str | None = None
    split: str | None = None
    revision: str | int | None = None
    manifest: Any = None
    types: Mapping[str, str] | None = None
    classes: Sequence[str] | None = None
    columns: Any = None
    decode: object = "auto"

    @property
    def format_name(self) -> str:
        """The name of the format, of an instance, too."""
        return self.format if isinstance(self.format, str) else self.format.name

    def listing(self, urls: Sequence[str], **more: Any) -> Listing:
        """Shards, with what was asked."""
        return Listing(
            urls=urls, **{"format": self.format, "columns": self.columns, "decode": self.decode, **more}
        )


class Spec(Struct, frozen=True, kw_only=True):
    """A source as the user named it, and its kind at first sight."""

    source: Any
    kind: str
    """"catalog", "opened" (its catalog is), "hub", "folder", "file", "pattern", "list", "name" (of a table in
    a catalog of tables), or "other" for what is no text."""
    texts: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The only text."""
        return self.texts[0]


class Listing(Struct, frozen=True, kw_only=True):
    """The shards that a source means, and what was said of them."""

    urls: Sequence[str] = ()
    """In reading order."""
    format: str | Format = "auto"
    facts: Mapping[str, Any] | None = None
    """By URL, what a table says of each; None: they are of no table."""
    table: str = ""
    """The table and its version, in words."""
    catalog: Catalog | None = None
    """The catalog that was named; None: it is to be found or made."""
    files: Any = None
    """Files that are a sample each, whose method `catalog_for(opening)` gives their catalog; None: they are
    shards."""
    columns: Any = None
    decode: object = "auto"
    cameras: Mapping[str, Any] = {}
    selects: Callable[..., Any] | None = None
    """Returns the `Selection` that counts, of a `BlockSource`, which it closes; None: all samples do."""
    spec: Spec | None = None
    """The source as it was named, where its own text tells the shards' names."""
    is_spelled: bool = False
    """True if a part of that text may turn out to be a folder or a pattern."""


class Row(Struct, frozen=True):
    """One meaning that a source may have."""

    name: str
    sign: str
    """By what it is known, in words."""
    claims: str
    """The function `(spec, asked, places) -> Listing | None`, as "module:function"."""
    kinds: Sequence[str]
    formats: Sequence[str] = ()
    """Names of `format=` that go with it; (): all."""
    endings: tuple[str, ...] = ()
    """The ends of files that it may be; (): any."""
    folder: str = ""
    """The folder that lies in it, where it is one itself; "": any."""
    may_claim: Callable[[Spec, SourceArguments, Places], bool] = lambda spec, asked, places: True
    """A cheap look, before what claims it is imported."""

    def is_asked(self, spec: Spec, asked: SourceArguments) -> bool:
        """Return whether the kind of source, its ending and `format=` are its own."""
        fits = not self.endings or spec.kind != "file" or file_name(spec.text).lower().endswith(self.endings)
        return spec.kind in self.kinds and fits and (not self.formats or asked.format_name in self.formats)

    def has_folder(self, spec: Spec, places: Places) -> bool:
        """Return whether its folder lies in a source that is one."""
        is_place = spec.kind in ("folder", "opened") and bool(spec.texts)
        return not is_place or self.folder in places.names(spec.text, "directory")


def _has_shards(spec: Spec, places: Places, but: Collection[str] = ()) -> bool:
    """Return whether a file in a folder ends as a format's do."""
    names = places.names(spec.text)
    return any(has_suffix(name) and name not in but and not name.startswith((".", "_")) for name in names)


def _are_files(spec: Spec, asked: SourceArguments, places: Places) -> bool:
    if asked.split is not None:
        return True
    if spec.kind == "folder":
        return not _has_shards(spec, places, MANIFESTS)
    return all(KIND_ENDING.search(file_name(text).lower()) for text in spec.texts)


def _are_splits(spec: Spec, asked: SourceArguments, places: Places) -> bool:
    if (asked.config, asked.split) != (None, None):
        return True
    if spec.kind != "folder" or not is_local(spec.text) or _has_shards(spec, places):
        return False
    names = places.names(spec.text)
    return not any(map(is_listing, names)) and not shards_in(names, asked.format_name)


_NAMED = ("folder", "file", "pattern", "list")
_ANY = ("catalog", "hub", *_NAMED, "name", "other")
_CATALOGS = (*_ANY, "opened")
_CATALOG = "dataflow.sources.opening:claim_catalog"
_ENERGON = "dataflow.sources.energon.folder:claim"
_MANIFEST = "dataflow.sources.loose:claim_manifest"
_FILES = "dataflow.sources.loose:claim_files"
_HERE = "dataflow.sources.listing.claims"
_TABLES = "dataflow.sources.tables.finding"
ROWS = (
    Row("catalog", "*.catalog", _CATALOG, ("catalog",)),
    Row(
        "manifest", "manifest=", _MANIFEST, _CATALOGS,
        may_claim=lambda spec, asked, places: asked.manifest is not None,
    ),
    Row("table", "*.csv, *.tsv", _MANIFEST, ("file",), ("auto", "files"), (".csv", ".tsv")),
    Row("LeRobot", "", "dataflow.sources.lerobot:claim", _CATALOGS, ("lerobot",)),
    Row("Megatron-Energon", "", _ENERGON, _CATALOGS, ("energon",)),
    Row("Delta table", "", f"{_TABLES}:claim_delta", _ANY, ("delta",)),
    Row("Iceberg table", "", f"{_TABLES}:claim_iceberg", _ANY, ("iceberg",)),
    Row("files", "", _FILES, _ANY, ("files",)),
    Row("Hub", "hf://", "dataflow.sources.hub:claim_repository", ("hub",)),
    Row(
        "Megatron-Energon", ".nv-meta/", _ENERGON, ("folder", "file", "opened", "other"), ("auto",),
        (".yaml", ".yml"), ".nv-meta",
    ),
    Row("catalog", "catalog=", _CATALOG, ("opened",)),
    Row("Delta table", f"{DELTA_LOG}/", f"{_TABLES}:claim_delta", ("folder",), folder=DELTA_LOG),
    Row(
        "Iceberg table", f"{ICEBERG_METADATA}/*.metadata.json", f"{_TABLES}:claim_iceberg",
        ("folder", "file", "name"), ("auto", "parquet"), (".metadata.json",), ICEBERG_METADATA,
    ),
    Row("files", "images, sounds, videos", _FILES, _NAMED, ("auto",), MEDIA_ENDINGS, "", _are_files),
    Row(
        "splits", "split=, config=, or no file beside its folders", "dataflow.sources.hub:claim_folder",
        _NAMED, may_claim=_are_splits,
    ),
    Row("text", "*.txt", f"{_HERE}:claim_text", ("file",), ("auto",), (".txt",)),
    Row("shards", "endings of the formats", f"{_HERE}:claim_shards", _ANY),
)  # fmt: skip
"""Meanings of a source, in this order; the last row claims or raises."""
PARTED_BY_FOLDERS = "dataflow.sources.tables.hive:parted_by_folders"
"""The function that makes columns of the names of folders such as `label=cat`, where shards lie in such."""


def resolve(source: Any, asked: SourceArguments, places: Places) -> Listing:
    """List what a source means.

    Raises:
        ValueError: arguments that go with none of what it may mean, no such split, config or version.
        ShardReadError: nothing is there, or the store refuses to say.
        CorruptShardError: what describes it is damaged.
        DataflowError: it is empty, or holds what is not read.
    """
    spec = spec_of(source, asked, places)
    missed: list[str] = []
    for row in ROWS:
        if not row.is_asked(spec, asked):
            continue
        has_folder = not row.folder or row.has_folder(spec, places)
        if has_folder and row.may_claim(spec, asked, places):
            try:
                listing: Listing | None = resolve_name(row.claims)(spec, asked, places)
            except ShardReadError as error:
                if row is ROWS[-1] and spec.kind == "folder":
                    error.add_note(f"nor has it what tells of anything else: {'; '.join(missed)}")
                raise
            if listing is not None:
                return listing
        missed.append(f"{row.name} ({row.sign})")
    raise AssertionError(spec)


def looked_again(listing: Listing, asked: SourceArguments, places: Places, error: ShardReadError) -> Listing:
    """List again what names turned out not to be: files. Raises the error where nothing else is meant."""
    if listing.table:
        raise _of_table(error, listing.table)
    is_folder = error.reason.startswith("is a directory")
    if (
        listing.spec is None
        or not listing.is_spelled
        or not (is_folder or error.reason.startswith("no such file"))
    ):
        raise error
    looks_up: LooksUp = "folders" if is_folder else "patterns"
    try:
        again = claim_shards(listing.spec, asked, places, looks_up)
    except ShardReadError:
        raise error from None
    if again.urls == listing.urls:
        raise error
    return again


def _of_table(error: ShardReadError, table: str) -> ShardReadError:
    """The error of a file that a table lists and that is not there, with what may have taken it away."""
    if not error.reason.startswith("no such file"):
        return error
    other = ShardReadError(
        error.shard,
        f"no such file, which {table} lists: vacuum, expire_snapshots or somebody removed it. Open a later "
        "version, or restore the file",
    )
    for note in getattr(error, "__notes__", ()):
        other.add_note(note)
    return other


def spec_of(source: Any, asked: SourceArguments, places: Places) -> Spec:
    """Say what kind of source it is, at first sight; one that is a list of one is this one."""
    if isinstance(source, (list, tuple)) and len(source) == 1:
        source = source[0]
    is_opened = isinstance(asked.catalog, Catalog)
    if is_opened or (asked.catalog is None and is_catalog(source)):
        texts = [os.fspath(source)] if isinstance(source, (str, os.PathLike)) else []
        return Spec(source=source, kind="opened" if is_opened else "catalog", texts=texts)
    items = [source] if isinstance(source, (str, os.PathLike)) else source
    if not isinstance(items, (list, tuple)) or not items:
        return Spec(source=source, kind="other")
    texts = [checked_text(item) for item in items]
    if any(map(is_hub, texts)):
        return Spec(source=source, kind="hub", texts=texts)
    if len(texts) > 1:
        return Spec(source=source, kind="list", texts=texts)
    return Spec(source=source, kind=_kind_of(texts[0], places), texts=texts)


def _kind_of(text: str, places: Places) -> str:
    if is_http(text):
        return "folder" if text.endswith("/") else "file"
    if text.startswith("iceberg://"):
        return "name"
    ending = file_name(text).rpartition(".")[2].lower()
    is_file = ending in KIND_OF or ending in TABLES_OF_FILES or ending == "json"
    if not (is_file and not is_local(text)) and places.folder(text) is not None:
        return "folder"
    return "pattern" if is_glob(text) or "{" in text else "file"


def refuse_unmeant(spec: Spec, asked: SourceArguments) -> None:
    """Raise `ValueError` where `config`, `split` or `revision` mean nothing."""
    if asked.revision is not None and not all(map(is_hub, spec.texts)):
        raise ValueError(
            f"revision= is for datasets on the Hub (hf://datasets/...) and for tables, got {asked.revision!r}"
        )
    if (asked.config, asked.split) != (None, None) and len(spec.texts) != 1:
        raise ValueError("config= and split= are for one repository or folder, not for a list of sources")


def claim_text(spec: Spec, asked: SourceArguments, places: Places) -> Listing:
    """A text file that is named alone: its lines are samples."""
    return structs.replace(claim_shards(spec, asked, places), format="text")


def claim_shards(spec: Spec, asked: SourceArguments, places: Places, looks_up: LooksUp = "") -> Listing:
    """The shards that patterns, names and folders mean: see `expand`."""
    if spec.kind != "hub" and (asked.config, asked.split, asked.revision) != (None, None, None):
        refuse_unmeant(spec, asked)
    urls = places.retrier(
        lambda: expand(
            spec.source,
            places.options,
            format=asked.format_name,
            looks_up=looks_up,
            known=places.known,
        ),
        spec.texts[0] if spec.texts else "",
        may_ask_nobody=True,
    )
    return asked.listing(urls, spec=spec, is_spelled=True)
