"""Tars as people make them, through the dataset and the loader: links, hidden files, scattered members."""

from __future__ import annotations

import io
import tarfile
import uuid
from pathlib import Path

import fsspec
import pytest
from datasets_kit import write_tar
from programs_kit import run_command

from dataflow import DataflowError, DataLoader, ShardedDataset
from sharding.catalog.build import default_catalog_path
from sharding.catalog.file import VERSION, read_table, write_table
from sharding.errors import CorruptShardError

pytestmark = pytest.mark.usefixtures("own_cache")


def with_links(num_samples: int) -> bytes:
    """Samples whose `bin` are all hard links to the first one, and whose `txt` are symbolic ones."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for i in range(num_samples):
            for end, payload in (("bin", b"x" * 900), ("cls", b"%d" % i), ("txt", b"text")):
                member = tarfile.TarInfo(f"{i:03d}.{end}")
                if i and end != "cls":
                    member.type = tarfile.LNKTYPE if end == "bin" else tarfile.SYMTYPE
                    member.linkname = f"000.{end}"
                    tar.addfile(member)
                else:
                    member.size = len(payload)
                    tar.addfile(member, io.BytesIO(payload))
    return out.getvalue()


@pytest.mark.parametrize("place", ["local", "memory"])
@pytest.mark.parametrize("checksum", [False, True])
def test_links_are_read_in_any_order_from_any_block(tmp_path: Path, place: str, checksum: bool) -> None:
    url = str(tmp_path / "x.tar") if place == "local" else f"memory://{uuid.uuid4().hex}/x.tar"
    with fsspec.open(url, "wb") as file:
        file.write(with_links(40))
    catalog = str(tmp_path / "x.catalog")
    more = ["--checksum"] if checksum else []
    assert run_command("index", url, "--block-bytes", "8KB", "--output", catalog, *more)[0] == 0
    dataset = ShardedDataset(catalog)
    assert dataset.catalog.num_blocks > 3
    assert (dataset[37]["cls"], len(dataset[37]["bin"]), dataset[37]["txt"]) == (37, 900, "text")
    for shuffle in (False, True):
        with DataLoader(dataset, 8, shuffle=shuffle, num_workers=0) as loader:
            rows = [row for b in loader for row in zip(b["cls"].tolist(), b["bin"], b["txt"], strict=True)]
        assert sorted(number for number, *_ in rows) == list(range(40))
        assert {(bytes(value.numpy().tobytes()), text) for _, value, text in rows} == {(b"x" * 900, "text")}


def test_what_was_passed_over_is_told(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("d/._0.cls", b"?"), ("d/0.cls", b"1"), ("d/.DS_Store", b"?")])
    code, text = run_command("index", tmp_path / "x.tar")
    assert (code, "2 files: hidden, or without an extension" in text) == (0, True)
    write_tar(tmp_path / "y.tar", [("d/._0.cls", b"?")])
    with pytest.raises(DataflowError, match=r"is empty: no samples .* and 1 files that are hidden"):
        ShardedDataset(str(tmp_path / "y.tar"))


def test_a_catalog_of_the_release_before_is_refused_or_made_anew(tmp_path: Path) -> None:
    """It may hold half samples, and none of links."""
    path = str(tmp_path / "x.tar")
    write_tar(Path(path), [("0.cls", b"1")])
    dataset = ShardedDataset(path)
    kept = default_catalog_path([path], dataset.catalog.codec())
    rows, facts, _ = read_table(kept, None)
    old = str(tmp_path / "old.catalog")
    for url in (kept, old):
        write_table(url, rows, {**facts, "version": VERSION - 1}, None)
    with pytest.raises(
        CorruptShardError, match=f"of version {VERSION - 1}, and this release reads {VERSION}"
    ):
        ShardedDataset(old)
    assert len(ShardedDataset(path)) == 1
    assert read_table(kept, None)[1]["format"] == "tar"
