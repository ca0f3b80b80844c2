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


def _ending(*endings: str, behind: str = "") -> re.Pattern[str]:
    return re.compile(rf"\.({'|'.join(endings)}){behind}(\.gz|\.zstd?)?$")


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
    counts: Counter[Unsupported] = Counter()
    others: Counter[str] = Counter()
    endings: dict[Unsupported, str] = {}
    paths = [name.lower() for name in names]
    files = [file_name(path) for path in paths]
    for path, file in zip(paths, files, strict=True):
        kind = next((kind for kind in _KINDS if kind.pattern.search(file)), None)
        if kind is None and _ZARR.pattern.search(path):
            kind = _ZARR
        if kind is None:
            others[file.rpartition(".")[2]] += 1
        else:
            counts[kind] += 1
            endings.setdefault(kind, match[0] if (match := kind.pattern.search(file)) else file)
    if not counts:
        return None
    kind = max(counts, key=lambda one: (one.is_sure, counts[one]))
    is_most = kind.is_sure or counts[kind] >= max(others.values(), default=0)
    return kind.text(endings[kind], reader) if is_most else None
