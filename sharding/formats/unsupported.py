"""Name what a user opens that is not read, and what to do with it, by the names of files alone.

A kind is told by an ending; Zarr, which many files make up together, by files that lie beside each other.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from sharding.urls import file_name


@dataclass(frozen=True)
class Unsupported:
    """A kind of data that is not read."""

    what: str
    pattern: re.Pattern[str]
    """Matches the lower-case name of such a file."""
    reader: str
    """A map-style dataset over it, or what such a dataset reads it with."""
    is_sure: bool = False
    """True if one such file tells that all of them are of this kind."""

    def text(self, ending: str, reader: str = "") -> str:
        """Return what it is and what to do, for a message."""
        return (
            f"{self.what} ({ending}) are not read as shards: give dataflow.DataLoader a map-style dataset "
            f"over them ({reader or self.reader}), or convert that dataset once, by "
            'dataflow.convert(dataset, "shards/", to="tar"): `dataflow convert` takes what is read; '
            "see docs/guide/coming-from.md"
        )


def _ending(*endings: str) -> re.Pattern[str]:
    return re.compile(rf"\.({'|'.join(endings)})(\.gz|\.zstd?)?$")


_ZARR = Unsupported(
    "Zarr arrays",
    re.compile(r"(^|/)(\.zgroup|\.zarray|\.zmetadata|zarr\.json)$|\.zarr(/|$)"),
    "zarr.open in its __getitem__",
    is_sure=True,
)
_KINDS = (
    _ZARR,
    Unsupported(
        "Lance tables",
        _ending("lance"),
        "one whose __getitems__ is lance.dataset(...).take, as in docs/guide/tables.md",
        is_sure=True,
    ),
    Unsupported(
        "image files",
        _ending("jpg", "jpeg", "png", "webp", "bmp", "gif", "ppm", "pgm", "tif", "tiff"),
        "torchvision.datasets.ImageFolder",
    ),
    Unsupported("CSV files", _ending("csv", "tsv"), "rows of pandas.read_csv; format='csv' reads plain ones"),
    Unsupported("HDF5 files", _ending("h5", "hdf5"), "h5py.File in its __getitem__"),
    Unsupported("FFCV files", _ending("beton"), "the one that the file was written from"),
)


def unsupported_text(names: Iterable[str], reader: str = "") -> str | None:
    """Return what the files of these names or URLs are, and what to do; None: they are of no known kind.

    `reader`: what gives a map-style dataset over them; "": that of the kind.
    """
    by_kind: dict[Unsupported, list[str]] = {}
    others: Counter[str] = Counter()
    for path in map(str.lower, names):
        file = file_name(path)
        in_zarr = _ZARR if _ZARR.pattern.search(path) else None
        if (kind := next((kind for kind in _KINDS if kind.pattern.search(file)), in_zarr)) is None:
            others[file.rpartition(".")[2]] += 1
        else:
            by_kind.setdefault(kind, []).append(file)
    if not by_kind:
        return None
    kind = max(by_kind, key=lambda candidate: (candidate.is_sure, len(by_kind[candidate])))
    if not kind.is_sure and len(by_kind[kind]) < max(others.values(), default=0):
        return None
    file = by_kind[kind][0]
    return kind.text(match[0] if (match := kind.pattern.search(file)) else file, reader)
