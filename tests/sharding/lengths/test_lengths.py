"""Lengths of samples against the samples themselves, for every format, and how little is read for them."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets_kit import MAKERS, write_tar
from formats_kit import lengths_of

from dataflow import ShardedDataset
from sharding.lengths.column_lengths import column_lengths, resolve_lengths
from sharding.lengths.kept import KeptLengths, LengthsFile
from sharding.lengths.unit_plan import LEFT_OUT


@pytest.fixture(params=sorted(MAKERS))
def made(request, tmp_path):
    return MAKERS[request.param](tmp_path)


def columns_with_lengths(made):
    return [name for name in ("txt", "lst", "bin", "vec", "tokens") if name in made.samples[0]]


def test_lengths_are_those_of_the_samples(made):
    catalog = made.open().catalog
    for name in columns_with_lengths(made):
        values = [row[name] for row in made.samples]
        expected = [len(v.encode()) if isinstance(v, str) else len(v) for v in values]
        found = lengths_of(catalog, name)
        assert found.dtype == np.int32
        assert found.tolist() == expected


@pytest.mark.parametrize("name", ["parquet", "arrow", "jsonl.gz"])
def test_an_integer_column_is_the_lengths(name, tmp_path):
    made = MAKERS[name](tmp_path)
    assert lengths_of(made.open().catalog, "label").tolist() == [r["label"] for r in made.samples]


@pytest.mark.parametrize("name", ["tar", "tar.gz", "tar.zst", "tokens.bin", "megatron"])
def test_nothing_is_read_where_the_catalog_knows(name, tmp_path):
    made = MAKERS[name](tmp_path)
    catalog = made.open().catalog
    column = columns_with_lengths(made)[0]
    assert len(column_lengths(catalog, column, None)) == len(made.samples)


def test_only_the_column_is_read_from_parquet(tmp_path):
    rows = [list(range(i % 7)) for i in range(300)]
    big = np.random.default_rng(0).bytes(1 << 20)
    table = pa.table({"big": [big] * 3 + [b""] * 297, "tokens": rows})
    pq.write_table(table, tmp_path / "a.parquet", use_dictionary=False)
    catalog = ShardedDataset(str(tmp_path / "a.parquet"), catalog=str(tmp_path / "c.catalog")).catalog
    read = []
    assert lengths_of(catalog, "tokens", read.append).tolist() == [i % 7 for i in range(300)]
    assert 0 < sum(read) < 100_000 < catalog.blocks.length.sum()


def test_a_sample_without_the_column_has_a_length_of_minus_one(tmp_path):
    write_tar(tmp_path / "a.tar", [("0.txt", b"abc"), ("0.cls", b"1"), ("1.cls", b"2")])
    assert lengths_of(ShardedDataset(str(tmp_path / "a.tar")).catalog, "txt").tolist() == [3, -1]
    table = pa.table({"l": [[1], None, [1, 2], [None]], "n": pa.array([1, None, 2, 3], pa.uint8())})
    pq.write_table(table, tmp_path / "a.parquet")
    catalog = ShardedDataset(str(tmp_path / "a.parquet")).catalog
    assert lengths_of(catalog, "l").tolist() == [1, -1, 2, -1]
    assert lengths_of(catalog, "n").tolist() == [1, -1, 2, 3]


def test_lengths_may_be_an_array_or_a_function(tmp_path):
    catalog = MAKERS["parquet"](tmp_path).open().catalog
    given = np.arange(catalog.num_samples, dtype=np.uint16)
    assert resolve_lengths(given, catalog, "lst", None).tolist() == given.tolist()
    assert resolve_lengths(lambda c: [3] * c.num_samples, catalog, "lst", None).tolist() == [3] * len(given)
    asked = []
    for column in ("label", None):
        with suppress(KeyError):
            resolve_lengths(column, catalog, "lst", lambda block, name: asked.append(name) or {}[name])
    assert asked == ["label", "lst"]
    wide = np.full(len(given), 1 << 40)
    assert resolve_lengths(wide, catalog, "lst", None).dtype == np.int64


def test_lengths_that_an_earlier_release_kept_are_found_anew(tmp_path, monkeypatch):
    """Those of nested columns of JSON Lines were of another text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = LengthsFile(num_samples=2, catalog="c", facts=["m"])
    earlier = json.dumps([1, file.catalog, *file.facts]).encode()
    name = f"c-{hashlib.blake2b(earlier, digest_size=16).hexdigest()}.npy"
    path = Path(file.path).with_name(name)
    path.parent.mkdir(parents=True)
    np.save(path, np.array([3, 4], np.int32))
    assert (KeptLengths([file]).lengths == LEFT_OUT).all()
    kept = KeptLengths([file])
    kept.note(np.arange(2), np.array([5, 6]))
    kept.save()
    assert KeptLengths([file]).lengths.tolist() == [5, 6]


def test_a_sample_that_comes_twice_counts_once_among_the_lengths_known(tmp_path, monkeypatch):
    """A balanced dataset has some again in one epoch, and others not at all."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kept = KeptLengths([LengthsFile(num_samples=3, catalog="c", facts=["m"])])
    kept.note(np.array([2, 0, 2]), np.array([7, 5, 7]))
    assert kept.lengths.tolist() == [5, LEFT_OUT, 7]
    assert not kept.is_complete
