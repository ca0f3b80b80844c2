"""Megatron-Energon's datasets as they lie: tars of WebDataset, and a folder `.nv-meta` that describes them.

`.info.json` counts the samples of each tar, `split.yaml` says which tars are in which part and what is left
out, `dataset.yaml` which members of a sample become which fields. Nothing of a dataset is run: fields are
columns by name, and what takes code of the dataset's author is refused.
"""

from __future__ import annotations

import json
import re
import warnings
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct

from dataflow.sources.listing.claims import Listing, SourceArguments, Spec
from dataflow.sources.listing.places import Places
from prefetch.store.small_files import SmallFiles
from sharding.catalog.table import Catalog
from sharding.errors import CorruptShardError, ShardReadError
from sharding.hub.card import yaml_value
from sharding.order.selection import Selection
from sharding.printable import listed
from sharding.urls import is_local, leaves_folder, local_path

T = TypeVar("T")
Columns = dict[str, str] | list[str] | None

_META = ".nv-meta"
_NO_YAML = "the YAML of Megatron-Energon needs another package: pip install 'dataflow-loader[hub]'"
_AGAIN = "run `energon prepare` on the folder again"
_OWN = (
    "and no code of a dataset is run: give columns= (members of the tars) and decode=, which take the place "
    "of dataset.yaml"
)
_TYPES = (
    "Captioning|Image|ImageClassification|Interleaved|MultiChoiceVQA|OCR|SimilarityInterleaved|Text|VidQA|"
    "VQA|VQAOCR"
)
_SAMPLE_TYPE = re.compile(rf"({_TYPES})Sample")
_CLASS = re.compile(rf"CrudeWebdataset|StandardWebdatasetFactory|({_TYPES})Webdataset")
_FIELD = re.compile(r"([^\[\]]+)((?:\[[^\[\]]+\])*)")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)")
_MOST_NAMES = 1_000_000
_NEWEST = 7
"""The newest version of Megatron-Energon whose datasets were tried."""


class EnergonPart(Struct, frozen=True, kw_only=True):
    """A part of a dataset, as a metadataset refers to it."""

    path: str = ""
    """The folder, or a file of JSON Lines."""
    split: str = "train"
    dataset_config: str = "dataset.yaml"
    split_config: str = "split.yaml"
    samples: tuple[int, int | None] = (0, None)
    """The samples that count, before any is left out; None: to the end."""
    fractions: tuple[float, float] = (0.0, 1.0)
    """The share of those, from where to where."""

    def bounds(self, total: int) -> tuple[int, int]:
        """The first of the samples that count, and the end. `ValueError` where there are not so many."""
        start, end = self.samples[0], total if self.samples[1] is None else self.samples[1]
        if not 0 <= start <= end <= total:
            raise ValueError(f"{self.path}: subset [{start}, {end}] of a dataset of {total:,} samples")
        size = end - start
        return start + int(size * self.fractions[0]), start + int(size * self.fractions[1])


@dataclass(frozen=True)
class JsonField:
    """Decode JSON and take a value out of it, by the first of some paths that leads to one."""

    paths: Sequence[Sequence[str]]

    def __call__(self, raw: bytes) -> Any:
        """Return the value in a JSON text. `ValueError` where no path leads to one."""
        whole = json.loads(bytes(raw))
        for path in self.paths:
            value = whole
            try:
                for name in path:
                    value = value[int(name) if isinstance(value, list) else name]
            except (KeyError, IndexError, ValueError, TypeError):
                continue
            return value
        raise ValueError(f"the JSON has no {' or '.join('[' + ']['.join(path) + ']' for path in self.paths)}")


class _Info(Struct):
    shard_counts: dict[str, int]
    energon_version: str | None = None


class _Splits(Struct, forbid_unknown_fields=True):
    split_parts: dict[str, list[str]]
    exclude: list[str] = []


class EnergonDataset(Struct, frozen=True, kw_only=True):
    """The contents of `.nv-meta`, as far as one part of the dataset goes."""

    part: EnergonPart
    root: str
    counts: dict[str, int]
    """The samples of each tar of the part, by its path in the folder."""
    excluded: dict[str, str]
    """By "tar/key" of the samples that are left out, the pattern that names them."""

    @property
    def shards(self) -> list[str]:
        """The URLs of the tars."""
        return [f"{self.root}/{name}" for name in self.counts]

    def selection(self, catalog: Catalog, keys_of: Callable[[Selection], Sequence[bytes]]) -> Selection:
        """The samples that are in the part; `keys_of` reads the keys of samples.

        Raises `CorruptShardError` for a tar that has other samples than are counted.
        """
        blocks, names = catalog.blocks, [*self.counts]
        held = np.bincount(blocks.shard, blocks.num_samples, len(names)).astype(np.int64)
        for (name, count), found in zip(self.counts.items(), held.tolist(), strict=True):
            if found != count:
                reason = f"holds {found:,} samples, and {_META} counts {count:,}: {_AGAIN}"
                raise CorruptShardError(f"{self.root}/{name}", reason)
        selection = Selection.whole(blocks.num_samples)
        bounds = self.part.bounds(len(selection))
        if bounds != (0, len(selection)):
            selection = selection.between(*bounds)
        excluded = sorted(self.excluded)

        def is_above(name: str) -> bool:
            first = bisect_left(excluded, f"{name}/")
            return first < len(excluded) and excluded[first].startswith(f"{name}/")

        apart = selection.of_blocks(np.array([is_above(name) for name in names])[blocks.shard])
        keys = keys_of(apart) if len(apart) else []
        first = np.cumsum([0, *apart.num_samples])
        if keys and len(selection) == blocks.num_samples.sum():
            shards = np.repeat(blocks.shard, apart.num_samples).tolist()
            there = {f"{names[shard]}/{key.decode()}" for shard, key in zip(shards, keys, strict=True)}
            tars = sorted({f"{names[shard]}/" for shard in shards})
            patterns = {name: pattern for name, pattern in self.excluded.items() if name not in there}
            elsewhere = {pattern for name, pattern in patterns.items() if not _tar_of(name, tars)}
            found = {self.excluded[name] for name in there & self.excluded.keys()}
            if unknown := sorted({*patterns.values()} - elsewhere - found):
                raise _names_nothing(unknown[0], f"{self.root}/{_META}")

        def is_kept(block: int, rows: Any) -> Any:
            shard = names[blocks.shard[block]]
            block_keys = keys[first[block] : first[block + 1]]
            mask = [f"{shard}/{key.decode()}" not in self.excluded for key in block_keys]
            return np.array(mask, np.bool_) if mask else np.ones(len(rows), np.bool_)

        return selection.where(is_kept) if keys else selection


def claim(spec: Spec, asked: SourceArguments, places: Places) -> Listing | None:
    """The tars of a part, with columns and rules for them; None: the source is no folder.

    Raises `ValueError` for what is not read, `CorruptShardError` for files that contradict each other.
    """
    if asked.revision is not None:
        raise ValueError(f"revision= is not for a folder of Megatron-Energon, got {asked.revision!r}")
    part = spec.source
    if not isinstance(part, EnergonPart):
        if not spec.texts or spec.kind == "list":
            return None
        if spec.text.endswith((".yaml", ".yml")):
            raise ValueError(
                f"{spec.text!r} is YAML: a metadataset of Megatron-Energon opens with "
                "Mixture.from_energon(...)"
            )
        config, split = asked.config or "dataset.yaml", asked.split or "train"
        part = EnergonPart(path=spec.text, split=split, dataset_config=config)
    dataset = read_energon(part, places.files)
    columns, decode = asked.columns, asked.decode
    if columns is None:
        columns, rules = fields_of(dataset, places.files)
        if rules and (decode == "auto" or isinstance(decode, Mapping)):
            decode = {**rules, **(decode if isinstance(decode, Mapping) else {})}
    return asked.listing(
        dataset.shards, format="tar", columns=columns, decode=decode, selects=partial(_selected, dataset)
    )


def _selected(dataset: EnergonDataset, source: Any) -> Selection:
    """The samples that its part counts in; closes the reader of the source."""
    from dataflow.joins.join import JoinSide

    with closing(source.reader):
        return dataset.selection(
            source.catalog, lambda apart: JoinSide(source, apart, "__key__").keys().to_pylist()
        )


def read_energon(part: EnergonPart, files: SmallFiles) -> EnergonDataset:
    """Read `.nv-meta` of a folder."""
    root = part.path.rstrip("/")
    root = local_path(root) if is_local(root) else root
    info_url = _first_there(root, [".info.json", ".info.yaml"], files)
    info = _converted(read_value(info_url, files), _Info, info_url)
    if min(info.shard_counts.values(), default=0) < 0:
        raise CorruptShardError(info_url, "counts fewer than 0 samples in a tar")
    version = info.energon_version or "0"
    if (major := version.partition(".")[0]).isdecimal() and int(major) > _NEWEST:
        warnings.warn(
            f"{info_url} is of version {version}; {_NEWEST} is the newest that was tried", stacklevel=5
        )
    others = ["split.json"] if part.split_config == "split.yaml" else []
    url = _first_there(root, [part.split_config, *others], files)
    splits = _converted(read_value(url, files), _Splits, url)
    if part.split not in splits.split_parts:
        raise ValueError(f"{url} has no part {part.split!r}: split= is one of {listed(splits.split_parts)}")
    known = info.shard_counts
    most = min(_MOST_NAMES, sum(known.values()) + len(known))
    tars, excluded, known_patterns = sorted(f"{name}/" for name in known), dict[str, str](), set[str]()
    for name, pattern in _braced(splits.exclude, url, most):
        excluded.setdefault(name, pattern)
        if name in known or _tar_of(name, tars):
            known_patterns.add(pattern)
    if unknown := [pattern for pattern in splits.exclude if pattern not in known_patterns]:
        raise _names_nothing(unknown[0], url)
    counts = dict[str, int]()
    for name, _ in _braced(splits.split_parts[part.split], url, len(known)):
        if leaves_folder(name):
            raise CorruptShardError(url, f"the name {name!r} leads out of the folder")
        if name not in known:
            raise CorruptShardError(url, f"names {name!r}, which {info_url} does not know: {_AGAIN}")
        if name in counts:
            raise CorruptShardError(url, f"names {name!r} twice")
        if name not in excluded:
            counts[name] = known[name]
    if not counts:
        raise ValueError(f"part {part.split!r} of {url} has no tars but those that it excludes")
    return EnergonDataset(part=part, root=root, counts=counts, excluded=excluded)


def _tar_of(name: str, tars: Sequence[str]) -> str:
    """The one of some tars, sorted, each with a slash behind it, that a sample is in; "": none is."""
    index = bisect_right(tars, name)
    return tars[index - 1] if index and name.startswith(tars[index - 1]) else ""


def _names_nothing(name: str, url: str) -> ValueError:
    reason = f"exclude in {url} names {name[:100]!r}, and there is no such tar or sample"
    return ValueError(f"{reason}: correct it, as what it means would be trained on")


def _first_there(root: str, names: Sequence[str], files: SmallFiles) -> str:
    """The URL of the first file that is there."""
    urls = [f"{root}/{_META}/{name}" for name in names]
    if url := next(filter(files.exists, urls), None):
        return url
    raise ShardReadError(urls[0], f"no such file: {_AGAIN}")


def read_value(url: str, files: SmallFiles) -> Any:
    """The value of a YAML or JSON file, keys as text. `CorruptShardError` where it is none."""
    raw = files.read(url)
    try:
        if url.endswith(".json"):
            return json.loads(raw)
        return _with_text_keys(yaml_value(raw.decode(), "it", needs=_NO_YAML))
    except (ValueError, RecursionError) as error:
        raise CorruptShardError(url, f"is damaged: {error!s:.500}") from error


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_text_keys(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return value


def _converted(value: Any, kind: type[T], url: str) -> T:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise CorruptShardError(url, f"is not what Megatron-Energon writes: {error}") from error


def _braced(patterns: Sequence[str], url: str, most: int) -> Iterator[tuple[str, str]]:
    """The names that patterns stand for, and the pattern; raises where these are more than there can be."""
    from braceexpand import braceexpand

    for pattern in patterns:
        try:
            if any(abs(int(a) - int(b)) > _MOST_NAMES for a, b in _RANGE.findall(pattern)):
                raise ValueError("stands for too many names")
            names = list(islice(braceexpand(pattern), most + 1))
            most -= len(names)
            if most < 0:
                raise ValueError(f"stands for more names than there are, or than {_MOST_NAMES:,} in all")
        except (ValueError, RecursionError) as error:
            raise CorruptShardError(url, f"the pattern {pattern!r:.200}: {error}") from error
        yield from ((name, pattern) for name in names)


# ---- fields ---------------------------------------------------------------------------------------------


def fields_of(dataset: EnergonDataset, files: SmallFiles) -> tuple[Columns, dict[str, JsonField]]:
    """The columns that dataset.yaml tells of, and rules for those in JSON; None: all members.

    Raises `ValueError` where it takes code of the dataset's author.
    """
    url = f"{dataset.root}/{_META}/{dataset.part.dataset_config}"
    is_named = dataset.part.dataset_config != EnergonPart().dataset_config
    if not is_named and not files.exists(url):
        return None, {}
    value = read_value(url, files)
    if not isinstance(value, dict):
        raise CorruptShardError(url, f"must be a mapping, got {value!r:.200}")
    fields, parts = value.get("field_map"), value.get("part_filter")
    if "__class__" in value:
        _check_class(value, _CLASS, url)
    if "sample_type" in value:
        _check_class(value["sample_type"], _SAMPLE_TYPE, url)
    known = {"__module__", "__class__", "sample_type", "field_map", "subflavors"}
    is_crude = value.get("__class__") == "CrudeWebdataset"
    if is_crude and isinstance(parts, list) and all(isinstance(part, str) for part in parts):
        known.add("part_filter")
    if other := sorted({*value} - known):
        raise ValueError(f"{url} has {other[0]}: {value[other[0]]!r:.100}, {_OWN}")
    if value.get("subflavors"):
        warnings.warn(f"{url}: subflavors are not delivered: {value['subflavors']!r:.200}", stacklevel=5)
    if is_crude:
        return parts, {}
    if not isinstance(fields, dict) or not all(isinstance(member, str) for member in fields.values()):
        raise ValueError(f"{url} has no field_map from fields to members, {_OWN}")
    columns, rules = dict[str, str](), dict[str, JsonField]()
    for field, text in fields.items():
        columns[field], paths = _member(text, f"{url}, field {field!r}")
        if paths:
            rules[field] = JsonField(paths)
    return columns, rules


def _check_class(value: Any, known: re.Pattern[str], url: str) -> None:
    module, name = (
        (value.get("__module__"), value.get("__class__")) if isinstance(value, dict) else ("", value)
    )
    if module != "megatron.energon" or not known.fullmatch(str(name)):
        raise ValueError(f"{url} is of class {module}.{name}, which is not known, {_OWN}")


def _member(text: str, where: str) -> tuple[str, Sequence[Sequence[str]]]:
    """The member, or alternatives, that a field is; and the paths in its JSON, if it is a part of that."""
    pairs = [match.groups() for option in text.split(",") if (match := _FIELD.fullmatch(option))]
    members = list(dict.fromkeys(member for member, _ in pairs))
    if not any(path for _, path in pairs) and len(pairs) > text.count(","):
        return "|".join(members), ()
    if len(members) != 1 or not members[0].lower().endswith(("json", "jsn")) or len(pairs) <= text.count(","):
        raise ValueError(f"{where}: {text!r} is neither members nor parts of one of JSON, {_OWN}")
    return members[0], tuple(tuple(path[1:-1].split("][")) if path else () for _, path in pairs)
