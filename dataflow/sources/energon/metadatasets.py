"""Metadatasets of Megatron-Energon: YAML files of datasets with weights or repetitions.

A file is read to a flat list of parts of datasets, as its owner does: weights of a blend inside another one
are multiplied, subsets are taken of subsets, and paths are from the folder of the file that has them.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from msgspec import Struct, structs

from dataflow.sources.energon.folder import EnergonPart, read_value
from prefetch.retries import RetryPolicy
from prefetch.store.retrier import Retrier
from prefetch.store.small_files import SmallFiles
from sharding.errors import CorruptShardError
from sharding.printable import listed
from sharding.urls import is_local, local_path

_DEEPEST, _MOST_DATASETS = 16, 10_000
_AMOUNTS = {"blend": "weight", "blend_epochized": "repetitions"}
_REFERENCE = {"path", "split_part", "dataset_config", "split_config", "subset", "subflavors"}


class Blend(Struct, frozen=True, kw_only=True):
    """The datasets of one split of a metadataset."""

    mode: str
    """"blend", "blend_epochized", or "": it is one dataset."""
    parts: list[tuple[EnergonPart, Fraction]]
    """Each with its weight (of 1 in all) or its repetitions."""


def open_members(
    source: Any, split: str, kind: Callable[..., Any], settings: Mapping[str, Any]
) -> tuple[list[Any], list[Fraction], bool]:
    """The datasets of a metadataset, an amount of each, and whether these are weights, not repetitions.

    `kind` is `ShardedDataset`, with `settings`. Raises `ValueError` for what is not supported, by its name,
    and `CorruptShardError` for damaged files.
    """
    url = os.fspath(source)
    url = local_path(url) if is_local(url) else url
    with Retrier(settings.get("retry") or RetryPolicy()) as retrier:
        files = SmallFiles(settings.get("storage_options") or {}, retrier)
        blend = _File(url=url, split=split, files=files).blend(EnergonPart())
    members = []
    for part, _ in blend.parts:
        if part.path.endswith(".jsonl"):
            whole = kind(part.path, **{**settings, "format": "jsonl"})
            members.append(whole.subset(slice(*part.bounds(len(whole)))))
        else:
            members.append(kind(part, **settings))
    return members, [amount for _, amount in blend.parts], blend.mode == "blend"


@dataclass(frozen=True, kw_only=True)
class _File:
    """One split of one file; `within` in what follows is what counts of every dataset below."""

    url: str
    split: str
    files: SmallFiles
    depth: int = 0
    references: list[str] = field(default_factory=list)
    """The paths that were followed from the first file on."""

    def blend(self, within: EnergonPart) -> Blend:
        """Read the file."""
        if self.depth > _DEEPEST:
            raise ValueError(f"{self.url}: metadatasets refer to each other more than {_DEEPEST} times deep")
        value = read_value(self.url, self.files)
        value = value if isinstance(value, dict) else {}
        if (value.get("__module__"), value.get("__class__")) != ("megatron.energon", "MetadatasetV2"):
            raise ValueError(
                f"{self.url} is no metadataset with __class__: MetadatasetV2, which alone is read"
            )
        splits = value.get("splits")
        if not isinstance(splits, dict) or self.split not in splits:
            raise ValueError(f"{self.url} has no split {self.split!r}, it has {listed(splits or ['none'])}")
        return self._node(splits[self.split], within)

    def _node(self, node: Any, within: EnergonPart) -> Blend:
        """A blend, or a reference to a dataset or to another file."""
        if not isinstance(node, dict):
            raise self._damaged("a dataset must be a mapping", node)
        mode = next((mode for mode in _AMOUNTS if mode in node), "")
        known = {mode, "subset"} if mode else _REFERENCE
        if node.get("shuffle_over_epochs_multiplier") == 1:
            known = known | {"shuffle_over_epochs_multiplier"}
        if others := sorted({*node} - known):
            cures = {"join": "use ShardedDataset.join", "aux": "read other files in transform="}
            cure = cures.get(others[0], f"what is supported here is {listed(sorted(known))}")
            raise ValueError(f"{self.url}: {others[0]} is not supported: {cure}")
        within = self._within(node.get("subset"), within)
        if not mode:
            return self._reference(node, within)
        nodes = node[mode]
        if not isinstance(nodes, list) or not nodes or not all(isinstance(child, dict) for child in nodes):
            raise self._damaged(f"{mode} must be a list of datasets", nodes)
        amounts = [self._amount(child.get(_AMOUNTS[mode], 1)) for child in nodes]
        total = (sum(amounts) if mode == "blend" else 0) or Fraction(1)
        parts: list[tuple[EnergonPart, Fraction]] = []
        for child, amount in zip(nodes, amounts, strict=True):
            rest = {key: value for key, value in child.items() if key != _AMOUNTS[mode]}
            inner = self._node(rest, within)
            if inner.mode not in ("", mode):
                raise ValueError(f"{self.url}: {mode} of a {inner.mode}: a metadataset has one or the other")
            parts += [(part, share * amount / total) for part, share in inner.parts]
        return Blend(mode=mode, parts=parts)

    def _reference(self, node: Mapping[str, Any], within: EnergonPart) -> Blend:
        """One dataset, or another file's split."""
        if node.get("subflavors"):
            warnings.warn(f"{self.url}: subflavors are not delivered: {node['subflavors']!r}", stacklevel=7)
        named = {key: node[key] for key in ("dataset_config", "split_config") if node.get(key)}
        split = node.get("split_part") or self.split
        if not all(isinstance(value, str) for value in (node.get("path"), split, *named.values())):
            raise self._damaged("a dataset needs a path, and names are text", node)
        path = _from_folder_of(self.url, node["path"])
        self.references.append(path)
        if len(self.references) > _MOST_DATASETS:
            raise ValueError(
                f"{self.url}: metadatasets refer to more than {_MOST_DATASETS:,} datasets and files"
            )
        if path.endswith(".yaml"):
            if named:
                raise ValueError(f"{self.url}: {next(iter(named))} is not for a metadataset ({path})")
            other = replace(self, url=path, split=split, depth=self.depth + 1)
            return other.blend(within)
        return Blend(mode="", parts=[(structs.replace(within, path=path, split=split, **named), Fraction(1))])

    def _within(self, subset: Any, outer: EnergonPart) -> EnergonPart:
        """Return what counts of a dataset with a subset, of which `outer` is taken."""
        if subset is None:
            return outer
        samples: tuple[int, int | None] = (0, None)
        low, high = 0.0, 1.0
        try:
            start, end = subset["range"]
            if isinstance(start, int):
                samples = (start, None if end == "end" else int(end))
            else:
                low, high = float(start.removesuffix("%")) / 100, float(end.removesuffix("%")) / 100
                if not (start[-1] == end[-1] == "%" and 0 <= low <= high <= 1):
                    raise ValueError(subset)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError):
            raise self._damaged("subset must be {range: [0%, 50%]} or {range: [0, 100]}", subset) from None
        if outer.samples != (0, None):
            raise ValueError(f"{self.url}: a subset by numbers of samples is for a single dataset only")
        size = high - low
        inner = (low + outer.fractions[0] * size, low + outer.fractions[1] * size)
        return EnergonPart(samples=samples, fractions=inner)

    def _amount(self, value: Any) -> Fraction:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < math.inf:
            raise self._damaged("weight and repetitions must be numbers >= 0", value)
        return Fraction(str(value))

    def _damaged(self, rule: str, value: object) -> CorruptShardError:
        return CorruptShardError(self.url, f"{rule}, got {value!r:.200}")


def _from_folder_of(url: str, path: str) -> str:
    """A path that a file names."""
    if "://" in path or path.startswith("/"):
        return path
    folder = url.rpartition("/")[0]
    while path.startswith(("../", "./")):
        first, _, path = path.partition("/")
        folder = folder.rpartition("/")[0] if first == ".." else folder
    return f"{folder}/{path}"
