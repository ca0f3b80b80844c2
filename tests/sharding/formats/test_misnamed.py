"""Compressed bytes under a name that does not say so are named in every format, with a cure that works."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from datasets_kit import write_megatron, write_tar
from http_kit import RangeServer, serving

from dataflow import DataLoader, ShardedDataset
from sharding.errors import CorruptShardError, ShardReadError

PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "zstd": zstandard.ZstdCompressor().compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
}
ENDINGS = {"gzip": ".gz", "zstd": ".zst"}


pytestmark = pytest.mark.usefixtures("own_cache")


def _of_table(new: Callable[..., pa.RecordBatchFileWriter]) -> bytes:
    out, table = io.BytesIO(), pa.table({"x": [1, 2, 3]})
    with new(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def written(folder: Path, ending: str) -> bytes:
    """A file of three samples."""
    path = folder / f"written.{ending}"
    if ending == "tar":
        write_tar(path, [(f"{i}.cls", b"1") for i in range(3)])
    elif ending == "parquet":
        pq.write_table(pa.table({"x": [1, 2, 3]}), path)
    elif ending == "jsonl":
        path.write_text('{"x": 1}\n' * 3)
    elif ending == "npy":
        np.save(path, np.arange(25, dtype=np.uint16))
    elif ending == "bin":
        path.write_bytes(np.arange(25, dtype=np.uint16).tobytes())
    else:
        return _of_table(pa.ipc.new_file if ending == "arrow" else pa.ipc.new_stream)
    return path.read_bytes()


@pytest.mark.parametrize("kind", PACK)
@pytest.mark.parametrize("ending", ["tar", "parquet", "arrow", "arrows", "jsonl", "npy", "bin"])
def test_compressed_bytes_under_a_plain_name_are_named_with_the_cure(
    tmp_path: Path, ending: str, kind: str
) -> None:
    packed = PACK[kind](written(tmp_path, ending))
    path = tmp_path / f"x.{ending}"
    path.write_bytes(packed)
    options = {"dtype": "uint16", "length": 8} if ending in ("bin", "npy") else {}
    name = f"x.{ending}{ENDINGS.get(kind)}" if kind in ENDINGS and ending in ("tar", "jsonl") else None
    cure = f"name it {name}" if name else f"`{kind} -dc < FILE`"
    with pytest.raises(CorruptShardError, match=f"it looks {kind}-compressed: .*{cure}"):
        ShardedDataset(str(path), **options)  # type: ignore[call-overload]
    if name:
        path.rename(tmp_path / name)
        assert len(ShardedDataset(str(tmp_path / name))) == 3


def test_a_compressed_index_of_megatron_is_named(tmp_path: Path) -> None:
    write_megatron(tmp_path / "x.bin", [[1, 2, 3]])
    (tmp_path / "x.idx").write_bytes(gzip.compress((tmp_path / "x.idx").read_bytes()))
    with pytest.raises(CorruptShardError, match=r"x\.idx, byte 0: it looks gzip-compressed"):
        ShardedDataset(str(tmp_path / "x.bin"))


def test_a_file_that_is_compressed_twice_or_otherwise_than_its_name_says_is_named(tmp_path: Path) -> None:
    content = written(tmp_path, "jsonl")
    for packed, words in (
        (gzip.compress(gzip.compress(content)), "it is compressed twice"),
        (PACK["zstd"](content), r"it looks zstd-compressed: name it x\.jsonl\.zst"),
    ):
        (tmp_path / "x.jsonl.gz").write_bytes(packed)
        with pytest.raises(CorruptShardError, match=words):
            ShardedDataset(str(tmp_path / "x.jsonl.gz"))


def test_numbers_that_begin_as_gzip_does_are_tokens(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for i in range(50):
        (tmp_path / f"{i}.bin").write_bytes(b"\x1f\x8b\x08\x00" + rng.bytes(4096 + 2))
    assert len(ShardedDataset(str(tmp_path), dtype="uint16", length=2050)) == 50


class TestContentEncoding:
    """HTTP servers that say that a file is encoded, which is of the way or of the file."""

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        content = written(tmp_path, "jsonl")
        (tmp_path / "plain.jsonl").write_bytes(content)
        (tmp_path / "named.jsonl.gz").write_bytes(gzip.compress(content))
        (tmp_path / "misnamed.jsonl").write_bytes(gzip.compress(content))
        return tmp_path

    @staticmethod
    def num_samples(url: str) -> int:
        with DataLoader(ShardedDataset(url), 2, num_workers=0) as loader:
            return sum(len(batch["x"]) for batch in loader)

    def test_ranges_are_the_file_s_own_bytes_whatever_its_encoding_is_called(self, folder: Path) -> None:
        with serving(RangeServer(folder)) as server:
            for encoding in ("gzip", "x-gzip"):
                server.more_fields = [("Content-Encoding", encoding)]
                assert self.num_samples(f"{server.url}/named.jsonl.gz") == 3
                assert self.num_samples(f"{server.url}/plain.jsonl?{encoding}") == 3

    def test_a_file_that_was_uploaded_compressed_names_the_header_and_a_cure(self, folder: Path) -> None:
        with serving(RangeServer(folder)) as server:
            server.more_fields = [("Content-Encoding", "gzip")]
            url = f"{server.url}/misnamed.jsonl"
            with pytest.raises(CorruptShardError, match="'Content-Encoding: gzip', put 'simplecache::'"):
                ShardedDataset(url)
            assert self.num_samples(f"simplecache::{url}") == 3

    def test_a_server_that_compresses_on_the_way_names_the_header_and_a_cure(self, folder: Path) -> None:
        with serving(RangeServer(folder)) as server:
            server.more_fields, server.packs = [("Content-Encoding", "gzip")], True
            for name in ("plain.jsonl", "named.jsonl.gz"):
                with pytest.raises(ShardReadError, match=r"'Content-Encoding: gzip'.*put 'simplecache::'"):
                    ShardedDataset(f"{server.url}/{name}")
                assert self.num_samples(f"simplecache::{server.url}/{name}") == 3
