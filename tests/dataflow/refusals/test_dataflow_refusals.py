"""What cannot be meant, and shards that are damaged, are refused with what to do; no thread is left."""

# mypy: disable-error-code="arg-type,call-overload,list-item"

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import make_ints_tar, make_megatron, make_parquet, make_tokens_bin, npy, write_tar
from formats_kit import RecordFormat
from threads_kit import our_threads, threads_left

from dataflow import (
    Bucketed,
    Cache,
    DataflowError,
    DataLoader,
    Mixture,
    Optional,
    Packed,
    Pad,
    ShardedDataset,
    Shuffle,
    TokenBudget,
)
from dataflow.sources.listing.expand import expand
from prefetch.errors import MemoryLimitError
from prefetch.ipc.payload import pack
from sharding.errors import CorruptShardError, ShardReadError
from sharding.formats import resolve_format

Content = bytes | Iterable[tuple[str, bytes]]
SCATTERED = [("0.a", b"1"), ("1.a", b"2"), ("0.b", b"3"), ("1.b", b"4")]
TOKENS = {"format": "tokens", "length": 4}


def written(folder: Path, files: Mapping[str, Content]) -> Path:
    """Write files by their bytes, and tars by their members."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, bytes):
            (folder / name).write_bytes(content)
        else:
            write_tar(folder / name, content)
    return folder


def opened(folder: Path, name: str, content: Content, **options: Any) -> ShardedDataset:
    return ShardedDataset(str(written(folder, {name: content}) / name), **options)


def parquet(**columns: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def garbled_tar(at: Path) -> bytes:
    """A tar whose third header is noise."""
    whole = (written(at, {"x": [(f"{i}.cls", b"1") for i in range(5)]}) / "x").read_bytes()
    return whole[:2048] + np.random.default_rng(0).bytes(512) + whole[2560:]


def rows(at: Path) -> ShardedDataset:
    return make_parquet(at).open(columns=["label"])


def ints(at: Path, **options: Any) -> ShardedDataset:
    """Numbers in tars, of its own folder."""
    return make_ints_tar(Path(mkdtemp(dir=at))).open(**options)


def two(at: Path) -> list[ShardedDataset]:
    return [ints(at), ints(at)]


def loader(at: Path, batching: Any, options: Mapping[str, Any] = {}, **more: Any) -> DataLoader:
    """Over documents of tokens."""
    return DataLoader(make_megatron(at).open(**options), batching=batching, **more)


def over(at: Path, batch_size: int = 1, **options: Any) -> DataLoader:
    return DataLoader(ints(at), batch_size, **options)


REFUSED: list[tuple[Callable[[Path], object], Any, str]] = [
    # what a source is
    (lambda _: expand("s3://b/{0..9.tar"), ValueError, r"unbalanced braces in 's3://b/\{0..9.tar'"),
    (lambda at: expand(written(at, {"train/a.txt": b""})),
     ShardReadError, r"no shards among its 0 files; it has sub-directories"),
    (lambda at: expand(at / "missing.tar"), ShardReadError, r"missing.tar: no such file"),
    (lambda at: expand([f"{written(at, {'a.tar': b'x', 'b/c': b''})}/*.tar", f"file://{at}/b/../a.tar"]),
     ValueError, r"once only, got '.*/a\.tar' twice"),
    (lambda _: expand("http://[::1]:8000/x.tar"), ValueError, "IPv6.*give the host by its name"),
    (lambda _: expand("http://me@[fe80::1%25eth0]/x.tar"), ValueError, "IPv6.*give the host by its name"),
    (lambda _: expand("http://[1:2:3:4:5:6:7:8]/x.tar"), ValueError, "IPv6.*give the host by its name"),
    (lambda _: expand("https://h/*.tar"), ValueError, "HTTP servers cannot be listed: give a brace pattern"),
    (lambda _: expand("http://h/data/"), ValueError, "HTTP servers cannot be listed: give a brace pattern"),
    (lambda _: expand("simplecache::https://h/x-*.tar"), ValueError, "give a brace pattern"),
    (lambda _: expand([]), ValueError, r"source must be a path, .* got \[\]"),
    (lambda _: expand(()), ValueError, r"source must be a path, .* got \(\)"),
    (lambda _: expand({"a.tar"}), ValueError, r"source must be a path, .* got {'a"),
    (lambda _: expand(3), ValueError, r"source must be a path, .* got 3"),
    (lambda _: expand([3]), ValueError, r"a shard must be a path or a URL, got 3"),
    (lambda _: expand(""), ValueError, r"a shard must be a path or a URL, got ''"),
    (lambda _: expand([b"a.tar"]), ValueError, r"a shard must be a path or a URL, got b'a"),
    (lambda _: expand(None), ValueError, r"source must be a path, .* got None"),
    (lambda _: expand("nosuch://b/x"), ValueError, r"nosuch://b/x: .*nosuch"),
    (lambda _: resolve_format("auto", ["a.tar", "c.tar", "b.parquet"]),
     ValueError, r"'a.tar' \(tar\) and 'b.parquet' \(parquet\)"),
    (lambda _: resolve_format("auto", ["a.tar", "a.xyz"]),
     ValueError, r"'a.xyz' by its ending .*format= one of tar, parquet, arrow"),
    (lambda _: resolve_format("zip", ["a.tar"]), ValueError, r"'auto' or one of tar, parquet, .*, got 'zip'"),
    (lambda _: resolve_format("auto", ["a.tar"], dtype="uint16"), ValueError, "dtype= is an option of"),
    (lambda _: resolve_format(RecordFormat(), ["a.tar"], length=3), ValueError, "length= is an option of"),
    (lambda at: opened(at, "a.jsonl", b'{"a": 1}', allow_unfinished=True),
     ValueError, "allow_unfinished= is an option of format='tar'"),
    (lambda at: ShardedDataset(written(at, {"data/train-00000-of-00002.parquet": parquet(x=[0])})),
     ShardReadError, r"1 shards data/train-\*-of-00002: 00001"),
    (lambda at: ShardedDataset(str(at / "x-*.tar")), ShardReadError, r"x-\*\.tar: no file matches"),
    (lambda at: ShardedDataset(str(at), cache="/nvme"), ValueError, r"must be a dataflow\.Cache"),
    (lambda _: Cache("x", limit=0), ValueError, "limit must be > 0"),
    (lambda _: Cache("x", limit="much"), ValueError, "a size must be like .* got 'much'"),
    (lambda _: Cache("x", limit="inf"), ValueError, "a size must be like .* got 'inf'"),
    (lambda _: Cache("x", limit=None), ValueError, "a size must be like .* got 'None'"),
    (lambda _: Cache("s3://bucket/cache"), ValueError, "not a local path: 's3://bucket/cache'"),
    # what shards hold
    (lambda at: opened(at, "a.tar", []), DataflowError, r"the dataset is empty: no samples in .*a\.tar"),
    (lambda at: opened(at, "a.tar", b""), CorruptShardError, r"a\.tar: is empty"),
    (lambda at: opened(at, "a.parquet", b""), CorruptShardError, r"a\.parquet: is empty"),
    (lambda at: opened(at, "a.arrow", b""), CorruptShardError, r"a\.arrow: is empty"),
    (lambda at: opened(at, "a.tar.gz", b""), CorruptShardError, r"a\.tar\.gz: is empty"),
    (lambda at: opened(at, "a.npy", b"", length=4), CorruptShardError, r"a\.npy: is empty"),
    (lambda at: opened(at, "a.bin", b"", dtype="uint16", length=4), CorruptShardError, r"a\.bin: is empty"),
    (lambda at: opened(at, "a.jsonl", b""), DataflowError, r"the dataset is empty: .*a\.jsonl"),
    (lambda at: opened(at, "a.tar", [("0.cls", b"1"), ("0.txt", b"a"), ("0.cls", b"2")]),
     CorruptShardError, r"byte 2048, sample '0'.*already has a member"),
    (lambda at: opened(at, "x.tar", SCATTERED),
     CorruptShardError, r"x\.tar, byte 2048, sample '0': .*tar --sort=name"),
    (lambda at: opened(at, "x.tar", SCATTERED, on_error="skip"),
     CorruptShardError, r"x\.tar, byte 2048, sample '0': .*tar --sort=name"),
    (lambda at: opened(at, "x.tar", SCATTERED, decode={"a": Optional(), "b": Optional()}),
     CorruptShardError, r"sample '0': the members of a sample are not neighbours: .*tar --sort=name"),
    (lambda at: opened(at, "a.tar", garbled_tar(at)), CorruptShardError, "byte 2048: not a tar header"),
    (lambda at: opened(at, "a.parquet", parquet(a=range(1000))[:-5]),
     DataflowError, r"a\.parquet, .* not a Parquet file, or truncated"),
    (lambda at: opened(at, "a.jsonl", b'{"a": 1}\n{"a": 2}\n{"a": \n{"a": 4}\n'),
     CorruptShardError, "byte 18: this line is not JSON"),
    (lambda at: opened(at, "a.jsonl", b'[{"a": 1}, 2]'),
     CorruptShardError, "is one JSON array whose item 1 is no object"),
    (lambda at: opened(at, "a.jsonl", b'[{"a": 1}, {"a"'),
     CorruptShardError, "is one JSON array, and is damaged"),
    (lambda at: opened(at, "a.jsonl", b'{"data": [{"a": 1}'),
     CorruptShardError, "byte 0: this line is not JSON"),
    (lambda at: opened(at, "a.bin", b"\x01" * 101, dtype="uint16", **TOKENS),
     CorruptShardError, r"a\.bin, byte 100: 101 bytes are no whole number"),
    (lambda at: opened(at, "a.bin", b"\x01" * 101, dtype="float32", **TOKENS),
     ValueError, "dtype must be an integer type"),
    (lambda at: opened(at, "a.npy", npy(np.zeros(100, np.float32)), length=4),
     CorruptShardError, r"array of integers.*<f4"),
    (lambda at: opened(at, "b.npy", npy(np.zeros(100, np.int32)), length=4, dtype="uint16"),
     CorruptShardError, "tokens are int32, not dtype='uint16'"),
    # what is asked of a dataset
    (lambda at: ints(at, block_bytes=0), ValueError, "block_bytes must be >= 1"),
    (lambda at: ints(at, on_error="ignore"), ValueError, "on_error must be"),
    (lambda at: rows(at)[47], IndexError, "sample index out of range: 47 in a dataset of 47"),
    (lambda at: rows(at)[-48], IndexError, "sample index out of range: -48 in a dataset of 47"),
    (lambda at: rows(at)[10**12], IndexError, "sample index out of range: 1000000000000 in a dataset of 47"),
    (lambda at: ints(at).__getitems__([0, 47]), IndexError, "out of range: 47 in"),
    (lambda at: ints(at).__getitems__([0, -48]), IndexError, "out of range: -48 in"),
    (lambda at: ints(at).__getitems__([0, 10**12]), IndexError, "out of range: 1000000000000 in"),
    (lambda at: ints(at)[1.0], TypeError, "'float' object cannot be interpreted as an integer"),
    (lambda at: ints(at)[[0.0, 1.0]], TypeError, r"list of integers, got 1-D float64.*subset\(mask\)"),
    (lambda at: ints(at)[[True] * 47], TypeError, r"list of integers, got 1-D bool.*subset\(mask\)"),
    (lambda at: ints(at)[[[0, 1]]], TypeError, r"list of integers, got 2-D int64.*subset\(mask\)"),
    (lambda at: ints(at).__getitems__(np.array([0.0, 1.5])),
     TypeError, "cannot be interpreted as an integer"),
    (lambda at: rows(at).subset([3, 1]), ValueError, "indices must ascend and not repeat: .* numpy.unique"),
    (lambda at: rows(at).subset([1, 1]), ValueError, "indices must ascend and not repeat: .* numpy.unique"),
    (lambda at: rows(at).subset([47]), IndexError, "an index lies outside a dataset of 47 samples"),
    (lambda at: rows(at).subset([-48]), IndexError, "an index lies outside a dataset of 47 samples"),
    (lambda at: rows(at).subset(slice(9, 0, -1)), ValueError, "a slice must ascend"),
    (lambda at: rows(at).subset([True, False]), ValueError, "a mask must have one bool for each of 47"),
    (lambda at: rows(at).subset([0.5]), ValueError, "indices must be a slice or a list of integers"),
    (lambda at: rows(at).take(-1), ValueError, "a number of samples must be >= 0, got -1"),
    (lambda at: rows(at).skip(-1), ValueError, "a number of samples must be >= 0, got -1"),
    (lambda at: rows(at).split({}, by="hash"), ValueError, "fractions must be >= 0 and at most 1 together"),
    (lambda at: rows(at).split({"a": 0.7, "b": 0.4}, by="hash"),
     ValueError, "fractions must be >= 0 and at most 1 together"),
    (lambda at: rows(at).split({"a": 1}, by="key"), ValueError, "by must be one of hash, shard, got 'key'"),
    (lambda at: rows(at).filter(pc.field("nothing") > 3),
     ValueError, "does not fit the columns .* No match for FieldRef"),
    (lambda at: rows(at).filter(pc.field("label") == "x"),
     ValueError, "does not fit the columns .* 'equal' has no kernel"),
    (lambda at: rows(at).filter("label > 3"),
     ValueError, "does not fit the columns .* Expected an Expression"),
    (lambda at: rows(at).filter(pc.field("label") + 1), ValueError, "a filter must be true or false"),
    (lambda at: rows(at).filter(pc.scalar(True)), ValueError, "a filter must look at a column"),
    (lambda at: make_tokens_bin(at).open().filter(pc.field("tokens") > 3),
     ValueError, "no columns to filter by"),
    (lambda at: ints(at).filter(pc.field("cls") > 3),
     ValueError, r"does not fit.*field\('jpg', 'size'\) > 1000"),
    # mixtures
    (lambda _: Mixture([]), ValueError, "a mixture needs a dataset"),
    (lambda at: Mixture([ints(at), [1, 2]]), TypeError, "is made of ShardedDataset and Mixture, got list"),
    (lambda at: Mixture(dict.fromkeys(two(at), 1), temperature=2), ValueError, "got weights and temperature"),
    (lambda at: Mixture(two(at), repeats=[1]), ValueError, "a mixture of 2 members got 1"),
    (lambda at: Mixture(two(at), repeats={ints(at): 1}), ValueError, "which is no member of the mixture"),
    (lambda at: Mixture(two(at), stop="all"), ValueError, "an epoch has a fixed length: leave out stop="),
    (lambda at: Mixture([ints(at), Mixture(two(at))]), ValueError, "a mixture of mixtures needs weights"),
    (lambda at: Mixture({ints(at): 1, Mixture({ints(at): 1}, stop="all"): 1}),
     ValueError, "a nested mixture gives shares only"),
    (lambda at: Mixture([ints(at), ints(at).take(0)]),
     ValueError, "every source of a mixture must hold samples"),
    (lambda at: Mixture(dict(zip(two(at), (-1, 1), strict=True))),
     ValueError, "weights must be finite numbers >= 0"),
    (lambda at: DataLoader(Mixture(two(at)), 4, Shuffle("full")), ValueError, "a mixture needs windows"),
    # batches by length
    (lambda _: Packed(8, columns="input_ids"), ValueError, "columns must be a list of names"),
    (lambda _: Packed(8, columns=["a", "a"]), ValueError, "columns names 'a' twice"),
    (lambda _: Packed(8, columns=["a", "b"], whole=["b"]), ValueError, "'b' is in columns and in whole"),
    (lambda _: Packed(8, columns=["a"], pad={"b": 1}), ValueError, "pad names 'b'"),
    (lambda at: loader(at, "packed"), ValueError, "batching must be Packed"),
    (lambda at: loader(at, TokenBudget(24), batch_size=4),
     ValueError, "TokenBudget decides .* leave batch_size=4 out"),
    (lambda at: loader(at, Bucketed(4), batch_size=4), ValueError, "leave batch_size=4 out"),
    (lambda at: loader(at, Packed(8), batch_size=0), ValueError, "batch_size must be >= 1"),
    (lambda at: loader(at, Packed(8, "words")), ValueError, "the batches have tokens; pass column="),
    (lambda at: loader(at, Packed(8), collate_fn=list),
     ValueError, "Packed lays samples into rows by itself: use batch_transform"),
    (lambda at: loader(at, TokenBudget(24, overlong="truncate"), collate_fn=list),
     ValueError, "leave collate_fn out"),
    (lambda at: loader(at, Packed(8), {"decode": {"tokens": Pad()}}),
     ValueError, "padded by decode=Pad.* leave that out"),
    (lambda at: loader(at, Packed(8), {"decode": {"tokens": "text"}}),
     ValueError, "must hold lists of numbers or bytes"),
    (lambda at: loader(at, Packed(8, lengths=np.ones(3, np.int64))),
     ValueError, "one a sample in file order"),
    # loaders over shards
    (lambda at: over(at, 0), ValueError, "batch_size must be >= 1, got 0"),
    (lambda at: over(at, memory_limit=0), ValueError, "memory_limit must be > 0 bytes"),
    (lambda at: over(at, memory_limit="lots"), ValueError, 'a size must be like 1000000, "512MB"'),
    (lambda at: over(at, memory_limit="infGB"), ValueError, "got 'infGB'"),
    (lambda at: over(at, memory_limit=float("inf")), ValueError, "got 'inf'"),
    (lambda at: DataLoader(make_tokens_bin(at).open(), 10_000, memory_limit=300_000),
     MemoryLimitError, "lower batch_size or raise memory_limit"),
    (lambda at: over(at, depth=0), ValueError, "depth must be >= 1"),
    (lambda at: over(at, num_workers=-1), ValueError, "num_workers must be >= 0, got -1"),
    (lambda at: over(at, num_workers=0, workers="thread"),
     ValueError, "num_workers=0 builds batches where they are asked for"),
    (lambda at: over(at, workers="threads"), ValueError, 'workers must be "process", "thread" or "auto"'),
    (lambda at: over(at, max_worker_restarts=-1), ValueError, "max_worker_restarts must be >= 0"),
    (lambda at: over(at, shuffle="none"), ValueError, r"shuffle must be .* give Shuffle\('none'\)"),
    (lambda at: over(at, timeout=-1), ValueError, "timeout must be >= 0"),
    (lambda at: over(at, timeout=float("nan")), ValueError, "timeout must be >= 0.*nan"),
    (lambda at: over(at, tail="all"), ValueError, "tail must be one of"),
    (lambda at: over(at, drop_last=True, tail="pad"),
     ValueError, "drop_last=True means tail=\"drop\", and tail is 'pad'"),
    (lambda at: over(at, seed=2**64), ValueError, "seeds and other key parts must fit 64 bits"),
    (lambda at: over(at).set_epoch(-1), ValueError, "epoch must be an integer >= 0, got -1"),
    (lambda at: over(at).set_epoch(1.5), ValueError, "epoch must be an integer >= 0, got 1.5"),
    (lambda at: over(at, multiprocessing_context="threads"),
     ValueError, "should specify a valid start method"),
    (lambda at: over(at, multiprocessing_context=object()), TypeError, "should be a valid context object"),
    (lambda at: iter(over(at).sampler), TypeError, "a loader over shards is iterated over"),
    (lambda at: len(over(at).sampler), TypeError, "a loader over shards is iterated over"),
    (lambda at: next(iter(torch.utils.data.DataLoader(ints(at), batch_sampler=over(at).batch_sampler))),
     TypeError, r"integrations\.accelerate\.prepare_loader"),
    (lambda at: DataLoader(ints(at, columns={"__repeat__": "cls"}), mark_repeats=True),
     ValueError, "has a column of its own called '__repeat__'"),
    (lambda at: over(at).load_state_dict(DataLoader(range(40), 4).state_dict()), ValueError,
     "map-style or iterable dataset, and this one is over shards.* begin anew, without the state"),
    # loaders over other datasets
    (lambda at: DataLoader(range(40), 4).load_state_dict(over(at).state_dict()), ValueError,
     "over shards, and this one is over a map-style.* begin anew, without the state"),
    (lambda _: DataLoader(range(4), mark_repeats=True),
     ValueError, "only a ShardedDataset or a Mixture has mark_repeats="),
    (lambda _: DataLoader(range(4)).set_epoch(-1), ValueError, "epoch must be an integer >= 0, got -1"),
    (lambda _: DataLoader(range(4)).set_epoch(1.5), ValueError, "epoch must be an integer >= 0, got 1.5"),
    (lambda _: DataLoader(range(4)).set_epoch(None), ValueError, "epoch must be an integer >= 0, got None"),
    (lambda _: DataLoader(range(4), prefetch_across_epochs=True),
     ValueError, "needs persistent_workers=True and in_order=True"),
    (lambda _: DataLoader(range(4), prefetch_across_epochs=True, num_workers=1),
     ValueError, "needs persistent_workers=True and in_order=True"),
    (lambda _: DataLoader(range(4), prefetch_across_epochs=True, num_workers=2, persistent_workers=True,
                          in_order=False),
     ValueError, "needs persistent_workers=True and in_order=True"),
    (lambda _: DataLoader(range(4), workers="threads", num_workers=1),
     ValueError, 'workers must be "process" or "thread", got \'threads\''),
    (lambda _: DataLoader(range(4), workers="auto", num_workers=1),
     ValueError, "over datasets that are not sharded workers must be"),
    (lambda _: DataLoader(range(4), workers="thread"), ValueError, 'workers="thread" needs num_workers > 0'),
    (lambda _: DataLoader(range(4), workers="thread", num_workers=1, multiprocessing_context="fork"),
     ValueError, "multiprocessing_context cannot be used with workers="),
    (lambda _: pack([torch.ones(2, requires_grad=True) * 2]),
     RuntimeError, r"requires_grad and was computed \(MulBackward0\)(.|\n)*detach"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), REFUSED, ids=[words for *_, words in REFUSED])
def test_what_cannot_be_meant_is_refused(
    call: Callable[[Path], object], error: Any, words: str, tmp_path: Path
) -> None:
    threads = our_threads()
    with pytest.raises(error, match=words):
        call(tmp_path)
    assert threads_left(but=threads) == []
