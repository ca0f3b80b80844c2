"""Find the format of a dataset: from its name, or from the endings of its files.

The table below is all there is: nothing registers itself. A format that is not in it is given as an instance.
One ending does not decide alone: `.bin` is Megatron's where the sibling `.idx` exists, else flat tokens.
The caller says how to look (`exists`); nothing here does I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any

from msgspec import Struct

from sharding.blocks import Format
from sharding.redaction import identity_of
from sharding.urls import file_name, naming_part


class FormatEntry(Struct, frozen=True, kw_only=True):
    """A format, described without importing it: each brings its own library."""

    where: str
    """The module and class, as "module:class"."""
    suffixes: tuple[str, ...]
    """Endings that it claims under `format="auto"`, without those of compression."""
    options: tuple[str, ...] = ()
    """Arguments of `resolve_format` that it takes."""
    sibling_suffix: str = ""
    """It has a claim only where a file with this last ending lies beside the shard; "": everywhere."""
    listed_name: str = ""
    """It has a claim only where file names begin so and an `index.json` lies beside them; "": everywhere."""
    may_be_compressed: bool = False
    """True if a file is read compressed, where its name says so."""
    may_be_empty: bool = False
    """True if a file of 0 bytes, not called a compressed one, has no samples: text that nobody wrote to."""
    takes_any_bytes: bool = False
    """True if indexing reads so little of a file that any bytes will do."""
    compressions: tuple[str, ...] = ()
    """Endings behind its own of files that it decompresses itself."""
    index: str = ""
    """The function that reads its `index.json`, `(value, url) -> [(names of a shard's file, what is said of
    it)]` or None, as "module:function"; "": it has none."""
    index_keys: tuple[str, ...] = ()
    """Two keys by which an `index.json` is its own; the first has the list of shards."""


_ARROW, _TABLES = "sharding.formats.arrow", "sharding.formats.tables.format"
_WITH_END = ("allow_unfinished",)
ENTRIES = {
    "tar": FormatEntry(
        where="sharding.formats.tar.format:TarFormat",
        suffixes=(".tar",),
        options=_WITH_END,
        may_be_compressed=True,
    ),
    "parquet": FormatEntry(where=f"{_ARROW}.parquet:ParquetFormat", suffixes=(".parquet", ".pq")),
    "arrow": FormatEntry(
        where=f"{_ARROW}.ipc:ArrowFileFormat", suffixes=(".arrow", ".feather", ".ipc"), options=_WITH_END
    ),
    "arrow-stream": FormatEntry(
        where=f"{_ARROW}.ipc:ArrowStreamFormat", suffixes=(".arrows", ".stream"), options=_WITH_END
    ),
    "jsonl": FormatEntry(
        where=f"{_ARROW}.jsonl:JsonlFormat",
        suffixes=(".jsonl", ".ndjson"),
        may_be_compressed=True,
        may_be_empty=True,
    ),
    "csv": FormatEntry(where="sharding.formats.tables.text:SeparatedFormat", suffixes=()),
    "text": FormatEntry(where="sharding.formats.tables.text:TextFormat", suffixes=(), may_be_empty=True),
    "tokens": FormatEntry(
        where="sharding.formats.tokens:TokensFormat",
        suffixes=(".npy", ".bin"),
        options=("dtype", "length", "header"),
        takes_any_bytes=True,
    ),
    "megatron": FormatEntry(
        where="sharding.formats.megatron:MegatronFormat",
        suffixes=(".bin",),
        options=("length",),
        sibling_suffix=".idx",
    ),
    "mds": FormatEntry(
        where="sharding.formats.streaming.mds:MdsFormat",
        suffixes=(".mds",),
        compressions=(".zstd", ".gz", ".br", ".bz2", ".snappy"),
        index="sharding.formats.streaming.listing:mds_shards",
        index_keys=("shards", "version"),
    ),
    "litdata": FormatEntry(
        where="sharding.formats.streaming.litdata:LitDataFormat",
        suffixes=(".bin",),
        options=("length",),
        listed_name="chunk-",
        index="sharding.formats.streaming.listing:litdata_chunks",
        index_keys=("chunks", "config"),
    ),
    "tfrecord": FormatEntry(
        where="sharding.formats.records.tfrecord:TFRecordFormat",
        suffixes=(".tfrecord", ".tfrecords"),
        may_be_compressed=True,
        may_be_empty=True,
    ),
    "array_record": FormatEntry(
        where="sharding.formats.records.array_record:ArrayRecordFormat",
        suffixes=(".array_record", ".arrayrecord"),
    ),
    "files": FormatEntry(where="sharding.formats.files:FilesFormat", suffixes=(), options=("classes",)),
    "delta": FormatEntry(where=f"{_TABLES}:DeltaFormat", suffixes=(), options=("version",)),
    "iceberg": FormatEntry(where=f"{_TABLES}:IcebergFormat", suffixes=(), options=("version",)),
    "hive": FormatEntry(
        where="sharding.formats.tables.hive:in_folders",
        suffixes=(),
        options=("version", "of", *_WITH_END, "dtype", "length", "header"),
    ),
}
"""By name, all formats that there are. One more is a file and an entry here."""
FORMATS = tuple(ENTRIES)
"""Names that `format=` takes, besides "auto"."""

_FORMAT_OF_SUFFIX = {
    suffix: name
    for name, entry in ENTRIES.items()
    for suffix in entry.suffixes
    if not entry.sibling_suffix and not entry.listed_name
}
_COMPRESSIONS = (".gz", ".zst")
LISTING_NAME = "index.json"
"""Name of the file that lists shards, for which the formats that read it have a name of their own."""
_OWN_COMPRESSIONS = tuple(
    suffix + compression
    for entry in ENTRIES.values()
    for suffix in entry.suffixes
    for compression in entry.compressions
)
_OF_SHARDS = re.compile(r"(?<=.)-\d{5,}-of-\d{5,}$")
"""The number that TensorFlow and TFDS write behind the ending of a shard: `train.tfrecord-00000-of-00010`."""


def resolve_format(
    name_or_instance: str | Format,
    urls: Sequence[str],
    *,
    exists: Callable[[str], bool] | None = None,
    **options: Any,
) -> Format:
    """The codec of a dataset.

    Args:
        name_or_instance: a name of `FORMATS`, "auto" to go by the endings of all urls, or an instance.
        urls: the shards, as `expand` lists them.
        exists: tells "megatron" from "tokens" by the sibling `.idx`, and "litdata" by `index.json`; without
            it `.bin` means "tokens".
        options: those of formats, as `ENTRIES` has them; None and False: not given. `dtype` of a token,
            `length` of a sample and bytes of a `header`, `allow_unfinished`, `version` of a table, `classes`,
            `of`: the format of files in folders that are called by values, which takes its own, too.

    Raises:
        ValueError: unknown or mixed endings, an unknown name, or an option of another format.
    """
    options = {name: value for name, value in options.items() if value is not None and value is not False}
    name = name_or_instance
    if not isinstance(name, str):
        _refuse_options(name.name, options, ())
        return name
    if name == "auto":
        name = _format_of_all(urls, exists)
    if name not in ENTRIES:
        raise ValueError(f"format must be 'auto' or one of {', '.join(FORMATS)}, got {name!r}")
    entry = ENTRIES[name]
    if options:
        _refuse_options(name, options, entry.options)
    if "of" in entry.options:
        rest = {option: options.pop(option) for option in [*options] if option not in ("version", "of")}
        options["inner"] = resolve_format(options.pop("of", "parquet"), (), **rest)
    return resolve_name(entry.where)(**options)  # type: ignore[no-any-return]


def catalog_options(codec: Format) -> dict[str, str | int]:
    """A format's options, as a catalog keeps them. `ValueError` for one that it cannot keep."""
    entry, options = ENTRIES.get(codec.name), codec.options()
    for option, value in options.items():
        what = f"option {option!r} of format {codec.name!r}"
        if entry is not None and option not in entry.options:
            raise ValueError(f"{what} is none of its options: give a class of your own a name of its own")
        try:
            copy = json.loads(json.dumps(value))
        except (TypeError, ValueError):
            copy = None
        if type(copy) is not type(value) or copy != value:
            raise ValueError(
                f"{what} cannot be kept in a catalog: options() gives {value!r}, not a JSON value"
            )
    return options


def suffix_of(url: str) -> str:
    """Lower-case ending that tells the format: ".tar" for `a.tar.gz` and `a.tgz`; "" where there is none."""
    name = file_name(url).lower()
    if name.endswith(_OWN_COMPRESSIONS):
        name = name.rpartition(".")[0]
    for compression in _COMPRESSIONS:
        name = name.removesuffix(compression)
    stem, dot, ending = _OF_SHARDS.sub("", name).rpartition(".")
    if not dot or not stem:
        return ""
    return ".tar" if ending == "tgz" else "." + ending


def format_of_suffix(url: str) -> str | None:
    """The format that a file's ending, compression aside, stands for; None: no known one."""
    return _FORMAT_OF_SUFFIX.get(suffix_of(url))


def may_be_empty(url: str, format_name: str | None = None) -> bool:
    """Return whether a file of 0 bytes has no samples, by its ending; else its upload failed."""
    entry = ENTRIES.get(format_name or format_of_suffix(url) or "")
    return entry is not None and entry.may_be_empty and not file_name(url).lower().endswith(_COMPRESSIONS)


def has_suffix(url: str, suffixes: Collection[str] | None = None) -> bool:
    """Return whether a file's ending, compression aside, is in `suffixes` (None: of any known format)."""
    return suffix_of(url) in (_FORMAT_OF_SUFFIX if suffixes is None else suffixes)


def sibling(url: str, suffix: str) -> str:
    """The URL of the file beside a shard that differs in its last ending: `x.bin` -> `x.idx`."""
    name = file_name(url)
    return beside(url, (name.rpartition(".")[0] or name) + suffix)


def beside(url: str, name: str) -> str:
    """The URL of a file of this name, or path, in the folder of another one."""
    part, file = naming_part(url), file_name(url)
    return url.replace(part, name.join(part.rsplit(file, 1)), 1)


def _format_of_all(urls: Sequence[str], exists: Callable[[str], bool] | None) -> str:
    first_url: dict[str, str] = {}
    for url in urls:
        name = format_of_suffix(url)
        if name is None:
            from sharding.formats.unsupported import unsupported_text

            if (unsupported := unsupported_text(urls)) is not None:
                raise ValueError(f"{identity_of(url)!r}: {unsupported}")
            rule = f"cannot tell the format of {identity_of(url)!r} by its ending"
            endings = ", ".join(_FORMAT_OF_SUFFIX)
            raise ValueError(f"{rule} (known: {endings}); give format= one of {', '.join(FORMATS)}")
        first_url.setdefault(name, url)
    if len(first_url) != 1:
        two = " and ".join(f"{identity_of(url)!r} ({name})" for name, url in list(first_url.items())[:2])
        raise ValueError(f"the shards of a dataset must have one format, got {two}")
    for name, entry in ENTRIES.items() if exists else ():
        if not exists or suffix_of(urls[0]) not in entry.suffixes:
            continue
        if entry.sibling_suffix and exists(sibling(urls[0], entry.sibling_suffix)):
            return name
        is_listed = entry.listed_name and file_name(urls[0]).startswith(entry.listed_name)
        if is_listed and exists(beside(urls[0], LISTING_NAME)):
            return name
    return next(iter(first_url))


def _refuse_options(name: str, options: Mapping[str, object], choices: Collection[str]) -> None:
    for option, value in options.items():
        if option not in choices:
            owner = next(other for other, entry in ENTRIES.items() if option in entry.options)
            raise ValueError(f"{option}= is an option of format={owner!r}, not of {name!r}; got {value!r}")
