"""Columns that the names of folders tell: `label=cat/part-0.parquet`, as Hive, Spark and pandas write them.

Types are those of pyarrow's `partitioning="hive"`: int32 where all values of a key are such numbers, else
text. A key that a file stores, too, is the column that is stored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from msgspec import structs

from dataflow.sources.listing.claims import Listing
from sharding.blocks import Format
from sharding.catalog.listings import common_folder
from sharding.formats import resolve_format
from sharding.formats.tables.hive import FolderValues
from sharding.redaction import identity_of
from sharding.urls import is_http, is_local, local_path

_MISSING = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?\d+", re.ASCII)
_SIGNS = re.compile(r"[*?\[{]")


def parted_by_folders(
    listing: Listing, codec: Format, types: Mapping[str, str] | None, is_named: bool
) -> Listing:
    """The listing with the columns that folders below the source are called by, if there are any.

    Args:
        listing: the files. What the source's own folder and those above are called by is no column.
        codec: the format of the files.
        types: column -> type as pyarrow calls it, such as "int64", in place of the one that values tell.
        is_named: whether `format=` says that there are such folders.

    Raises `ValueError` for types of no such column, and for values that are not of their type.
    """
    urls = listing.urls
    root = _root_of(listing.spec.source if listing.spec else None, urls)
    values = {url: _values_of(url, root) for url in urls}
    types = types or {}
    texts: dict[str, set[str]] = {}
    for pairs in values.values():
        for key, text in pairs.items():
            texts.setdefault(key, set()).add(text)
    if unknown := sorted({*types} - {*texts}):
        raise ValueError(f"types names {unknown[0]!r}, and no folder is called '{unknown[0]}=...'")
    if not texts and is_named:
        raise ValueError(f"format='hive' is for folders called by values, and none of {root} is")
    if not texts:
        return listing
    kinds = {key: _type_of(key, labels - {_MISSING}, types) for key, labels in texts.items()}
    facts = {
        url: FolderValues(
            values={key: _scalar(pairs.get(key, _MISSING), kind, key, url) for key, kind in kinds.items()}
        )
        for url, pairs in values.items()
    }
    version = ", ".join(f"{key}: {kind}" for key, kind in kinds.items())
    return structs.replace(listing, format=resolve_format("hive", (), version=version, of=codec), facts=facts)


def _root_of(source: Any, urls: Sequence[str]) -> str:
    """The folder that a source begins with; of several sources, the one that all files have in common."""
    if isinstance(source, (list, tuple)) and len(source) == 1:
        source = source[0]
    if isinstance(source, (str, os.PathLike)):
        text = os.fspath(source)
        sign = _SIGNS.search(text)
        root = text[: sign.start()].rpartition("/")[0] if sign else text.rstrip("/")
        root = local_path(root) if is_local(text) else root
        if all(url.startswith(f"{root}/") for url in urls):
            return root
    return common_folder(url[: url.rindex("/") + 1] for url in urls)[:-1]


def _values_of(url: str, root: str) -> dict[str, str]:
    """Key -> value of the folders of a file below the root."""
    path = identity_of(url).removeprefix(identity_of(root)).rpartition("/")[0]
    parts = (unquote(path) if is_http(url) else path).split("/")
    pairs = (part.partition("=") for part in parts if "=" in part[1:])
    try:
        return {unquote(k, errors="strict"): unquote(value, errors="strict") for k, _, value in pairs}
    except UnicodeDecodeError as error:
        raise ValueError(f"a folder of {identity_of(url)} is called by no UTF-8 text: {error}") from error


def _type_of(key: str, texts: Collection[str], types: Mapping[str, str]) -> pa.DataType:
    if name := types.get(key):
        try:
            return pa.type_for_alias("string" if name == "text" else name)
        except ValueError as error:
            raise ValueError(f"types has {name!r} for {key!r}, which is no type of pyarrow's") from error
    is_number = texts and all(_INTEGER.fullmatch(text) and -(2**31) <= int(text) < 2**31 for text in texts)
    return pa.int32() if is_number else pa.string()


def _scalar(text: str, kind: pa.DataType, key: str, url: str) -> pa.Scalar:
    try:
        return pa.scalar(None if text == _MISSING else text, pa.string()).cast(kind)
    except pa.ArrowInvalid as error:
        raise ValueError(f"the folder {key}={text} of {identity_of(url)} is no {kind}") from error
