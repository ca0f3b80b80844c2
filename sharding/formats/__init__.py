"""Which format a dataset has: from its name, or from the endings of its files.

The table below is all there is: no registry. A format that is not in it is given as an instance. One
ending does not decide alone: `.bin` is Megatron's where the sibling `.idx` exists, else flat tokens.
The caller says how to look (`exists`); nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np

from sharding.blocks import Format
from sharding.redaction import identity_of
from sharding.urls import file_name, naming_part

FORMATS = ("tar", "parquet", "arrow", "arrow-stream", "jsonl", "tokens", "megatron")
"""Names that `format=` takes, besides "auto"."""

_FORMAT_OF_SUFFIX = {
    ".tar": "tar",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".arrows": "arrow-stream",
    ".stream": "arrow-stream",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".npy": "tokens",
    ".bin": "tokens",
}
_COMPRESSIONS = (".gz", ".zst")
_TOKEN_FORMATS = ("tokens", "megatron")
_WITH_END = ("tar", "arrow", "arrow-stream")
"""Formats whose files say where they end."""


def resolve_format(
    name_or_instance: str | Format,
    urls: Sequence[str],
    *,
    dtype: str | None = None,
    length: int | None = None,
    allow_unfinished: bool = False,
    exists: Callable[[str], bool] | None = None,
) -> Format:
    """The codec of a dataset.

    Args:
        name_or_instance: a name of `FORMATS`, "auto" to go by the endings of all urls, or an instance.
        urls: the shards, as `expand` lists them.
        dtype: numpy dtype of a token; for "tokens" only.
        length: tokens of a sample; for "tokens" and "megatron".
        allow_unfinished: read files that end too early; for "tar", "arrow" and "arrow-stream".
        exists: tells "megatron" from "tokens" by the sibling `.idx`; without it `.bin` means "tokens".

    Raises:
        ValueError: unknown or mixed endings, an unknown name, or an option of another format.
    """
    name = name_or_instance
    if not isinstance(name, str):
        _refuse_options(name.name, dtype=dtype, length=length, allow_unfinished=allow_unfinished or None)
        return name
    if name == "auto":
        name = _format_of_all(urls)
        if suffix_of(urls[0]) == ".bin" and exists and exists(sibling(urls[0], ".idx")):
            name = "megatron"
    if name != "tokens":
        _refuse_options(name, dtype=dtype)
    if name not in _TOKEN_FORMATS:
        _refuse_options(name, length=length)
    if name not in _WITH_END:
        _refuse_options(name, allow_unfinished=allow_unfinished or None)
    return _make(name, dtype, length, allow_unfinished)


def suffix_of(url: str) -> str:
    """Lower-case ending that tells the format: ".tar" for `a.tar.gz` and `a.tgz`; "" where there is none."""
    name = file_name(url).lower()
    for compression in _COMPRESSIONS:
        name = name.removesuffix(compression)
    stem, dot, ending = name.rpartition(".")
    if not dot or not stem:
        return ""
    return ".tar" if ending == "tgz" else "." + ending


def has_suffix(url: str, suffixes: Collection[str] | None = None) -> bool:
    """Whether a file's ending, compression aside, is one of `suffixes` (None: of any known format)."""
    return suffix_of(url) in (_FORMAT_OF_SUFFIX if suffixes is None else suffixes)


def sibling(url: str, suffix: str) -> str:
    """The URL of the file beside a shard that differs in its last ending: `x.bin` -> `x.idx`."""
    part, name = naming_part(url), file_name(url)
    beside = (name.rpartition(".")[0] or name) + suffix
    return url.replace(part, beside.join(part.rsplit(name, 1)), 1)


def _format_of_all(urls: Sequence[str]) -> str:
    found: dict[str, str] = {}
    for url in urls:
        name = _FORMAT_OF_SUFFIX.get(suffix_of(url))
        if name is None:
            known = ", ".join(_FORMAT_OF_SUFFIX)
            rule = f"cannot tell the format of {identity_of(url)!r} by its ending (known: {known})"
            raise ValueError(f"{rule}; give format= one of {', '.join(FORMATS)}")
        found.setdefault(name, url)
    if len(found) != 1:
        two = " and ".join(f"{identity_of(url)!r} ({name})" for name, url in list(found.items())[:2])
        raise ValueError(f"the shards of a dataset must have one format, got {two}")
    return next(iter(found))


def _refuse_options(name: str, **options: str | int | None) -> None:
    for option, value in options.items():
        if value is not None:
            owner = "tar" if option == "allow_unfinished" else "tokens"
            raise ValueError(f"{option}= is an option of format={owner!r}, not of {name!r}; got {value!r}")


def _make(name: str, dtype: str | None, length: int | None, allow_unfinished: bool) -> Format:
    # Imported here: each brings its own library, and most datasets need one.
    match name:
        case "tar":
            from sharding.formats.tar.format import TarFormat

            return TarFormat(allow_unfinished=allow_unfinished)
        case "parquet":
            from sharding.formats.arrow.parquet import ParquetFormat

            return ParquetFormat()
        case "arrow":
            from sharding.formats.arrow.ipc import ArrowFileFormat

            return ArrowFileFormat(allow_unfinished=allow_unfinished)
        case "arrow-stream":
            from sharding.formats.arrow.ipc import ArrowStreamFormat

            return ArrowStreamFormat(allow_unfinished=allow_unfinished)
        case "jsonl":
            from sharding.formats.arrow.jsonl import JsonlFormat

            return JsonlFormat()
        case "tokens":
            from sharding.formats.tokens import TokensFormat

            return TokensFormat(dtype=None if dtype is None else np.dtype(dtype).name, length=length)
        case "megatron":
            from sharding.formats.megatron import MegatronFormat

            return MegatronFormat(length=length)
    raise ValueError(f"format must be 'auto' or one of {', '.join(FORMATS)}, got {name!r}")


__all__ = ["FORMATS", "has_suffix", "resolve_format", "sibling", "suffix_of"]
