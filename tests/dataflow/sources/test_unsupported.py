"""Sources that are not read: the error says what they are and what to do."""

from __future__ import annotations

from pathlib import Path

import fsspec
import numpy as np
import pytest

from dataflow import DataflowError, DataLoader, ShardedDataset, convert
from sharding.errors import ShardReadError
from sharding.formats.unsupported import unsupported_text

SOURCES = {
    "csv": ("CSV files (.csv)", "pandas.read_csv; format='csv' reads plain ones", ["a.csv", "b.csv"]),
    "tsv": ("CSV files (.tsv.gz)", "pandas.read_csv", ["a.tsv.gz"]),
    "hdf5": ("HDF5 files (.h5)", "h5py", ["a.h5"]),
    "zarr": ("Zarr arrays", "zarr.open", [".zgroup", "a/.zarray", "a/0.0", "a/0.1"]),
    "zarr 3": ("Zarr arrays", "zarr.open", ["zarr.json", "a/c/0/0"]),
    "lance": ("Lance tables (.lance)", "docs/guide/tables.md", ["data/0a.lance", "_versions/1.manifest"]),
    "beton": ("FFCV files (.beton)", "written from", ["a.beton"]),
}


@pytest.mark.parametrize("name", SOURCES)
def test_an_error_says_what_a_folder_is_and_what_to_do(name: str, tmp_path: Path) -> None:
    what, reader, files = SOURCES[name]
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_bytes(b"content")
    single = [str(tmp_path / file) for file in files if not file.startswith((".", "labels", "a/"))]
    for source in (str(tmp_path), single or str(tmp_path)):
        with pytest.raises((DataflowError, ValueError)) as caught:
            ShardedDataset(source)
        message = str(caught.value)
        assert str(tmp_path) in message
        assert what in message, message
        assert reader in message
        for cure in ("dataflow.DataLoader a map-style", "dataflow.convert(", "docs/guide/coming-from.md"):
            assert cure in message


def test_so_does_that_of_a_folder_of_a_store() -> None:
    files = fsspec.filesystem("memory")
    for name in ("a.h5", "b.h5"):
        files.pipe(f"/unsupported/{name}", b"content")
    with pytest.raises(ShardReadError, match=r"memory://unsupported: HDF5 files \(\.h5\)"):
        ShardedDataset("memory://unsupported")


def test_a_store_may_have_no_files_at_the_top_of_a_lance_table() -> None:
    fsspec.filesystem("memory").pipe("/points.lance/data/0a.lance", b"content")
    with pytest.raises(ShardReadError, match=r"memory://points.lance: Lance tables \(\.lance\)"):
        ShardedDataset("memory://points.lance")


def test_tokens_called_like_chunks_are_tokens_without_an_index(tmp_path: Path) -> None:
    (tmp_path / "chunk-0-0.bin").write_bytes(bytes(2 * 9))
    assert len(ShardedDataset(str(tmp_path), dtype="uint16", length=4)) == 2


def test_a_kind_that_nobody_knows_is_no_kind() -> None:
    assert unsupported_text(["a.xyz", "README.md"]) is None
    assert unsupported_text([]) is None
    assert unsupported_text(["a.json", "b.json", "logo.png"]) is None  # JSON Lines, maybe


class Rows:
    """What stands for a file of HDF5, Zarr or FFCV: a map-style dataset over it."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"image": np.full((2, 3), index, np.uint8), "label": index}


@pytest.mark.usefixtures("own_cache")
def test_both_ways_that_the_error_names_lead_on(tmp_path: Path) -> None:
    with DataLoader(Rows(), batch_size=4) as loader:
        assert [batch["label"].tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    convert(Rows(), tmp_path / "shards", to="tar", workers=1, progress=False)
    dataset = ShardedDataset(tmp_path / "shards")
    assert [int(dataset[i]["label.cls"]) for i in range(len(dataset))] == [*range(10)]
    assert dataset[7]["image.npy"].tolist() == [[7, 7, 7], [7, 7, 7]]
