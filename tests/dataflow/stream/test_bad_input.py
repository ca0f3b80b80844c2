"""Damage and hostile conditions: each is named with its place, nothing is lost silently, nothing hangs."""

from __future__ import annotations

import os
import re
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import (
    NUM_SAMPLES,
    Made,
    by_plan,
    delivered,
    edited,
    make_ints_tar,
    make_jsonl,
    make_parquet,
    make_tar,
    make_tokens_bin,
    npy,
    rank,
    rows_of,
    write_tar,
)
from forked_kit import fast_ranks
from fsspec.implementations.memory import MemoryFileSystem
from threads_kit import our_threads, threads_left

from dataflow import DataflowError, DataLoader, Image, ShardedDataset, Shuffle
from dataflow.stream import deliveries
from dataflow.testing import RankError
from prefetch.engine.ledger import Ledger, State
from prefetch.errors import MemoryLimitError, StallError
from sharding.errors import CorruptShardError, SampleError, ShardChangedError, ShardReadError


def open_tar(folder: Path, name: str = "a.tar", **options: Any) -> ShardedDataset:
    return ShardedDataset(str(folder / name), catalog=str(folder / "c"), **options)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = our_threads()
    yield
    assert threads_left(but=before) == []


# ---- shards that cannot be indexed --------------------------------------------------------------------


def test_a_truncated_tar_names_shard_and_offset(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [(f"{i}.cls", b"1" * 600) for i in range(5)])
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "a.tar").write_bytes(whole[: 2 * 1536 + 700])
    with pytest.raises(CorruptShardError, match=r"a\.tar, byte 3072") as caught:
        open_tar(tmp_path)
    assert caught.value.offset == 3072


@pytest.fixture
def unfinished(tmp_path: Path) -> Path:
    """Three shards of five samples; the last member of b is cut in its padding, that of c in its payload."""
    for name in "abc":
        write_tar(tmp_path / f"{name}.tar", [(f"{name}{i}.cls", str(i).encode() * 3) for i in range(5)])
    for name, kept in (("b", 5 * 1024 - 100), ("c", 4 * 1024 + 513)):
        path = tmp_path / f"{name}.tar"
        path.write_bytes(path.read_bytes()[:kept])
    return tmp_path


def test_a_tar_cut_in_its_padding_is_an_error_and_may_be_allowed(unfinished: Path) -> None:
    with pytest.raises(
        CorruptShardError, match=r"b\.tar, byte 5020: .*'b4\.cls'.*allow_unfinished"
    ) as caught:
        open_tar(unfinished, "*.tar")
    assert "1 of the other 2 shards" in caught.value.__notes__[0]
    told = (
        r"2 of 3 shards are unfinished.*: b\.tar: no block of zeros .*; c\.tar: it ends inside .*'c4\.cls'$"
    )
    for _ in range(2):  # indexed, and from the catalog that was kept
        with pytest.warns(UserWarning, match=told):
            dataset = open_tar(unfinished, "*.tar", allow_unfinished=True)
        with DataLoader(dataset, 3, shuffle=False) as loader:
            assert [int(i) for batch in loader for i in batch["cls"]] == [0, 111, 222, 333, 444] * 2 + [
                *(0, 111, 222, 333)
            ]
            assert loader.stats().unfinished_shards == 2
    with pytest.raises(CorruptShardError, match=r"b\.tar"):  # the catalog of what was allowed is not believed
        open_tar(unfinished, "*.tar")


def test_a_catalog_of_unfinished_shards_says_so_and_a_finished_dataset_does_not(unfinished: Path) -> None:
    kept = str(unfinished / "kept.catalog")
    with pytest.warns(UserWarning, match="2 of 3"):
        ShardedDataset(str(unfinished / "*.tar"), catalog=kept, allow_unfinished=True)
    with pytest.warns(UserWarning, match="2 of 3"):
        assert len(ShardedDataset(kept)) == 14
    dataset = ShardedDataset(str(unfinished / "a.tar"), catalog=str(unfinished / "d"), allow_unfinished=True)
    with DataLoader(dataset, 3) as loader:
        assert loader.stats().unfinished_shards == 0


def test_members_without_a_key_are_no_samples(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("README", b"x"), ("0.cls", b"1"), ("LICENSE", b"y"), ("1.cls", b"2")])
    with DataLoader(open_tar(tmp_path), 9, shuffle=False) as loader:
        assert delivered(loader) == [[{"cls": 1}, {"cls": 2}]]


@pytest.mark.parametrize("name", ["a.tar", "a.parquet", "a.arrow", "a.arrows", "a.tar.gz", "a.jsonl.zst"])
def test_a_file_of_another_kind_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"this is no such file at all\n" * 100)
    with pytest.raises(DataflowError, match=name):
        open_tar(tmp_path, name)


def test_parquet_files_of_another_schema_name_both(tmp_path: Path) -> None:
    pq.write_table(pa.table({"a": [1, 2]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": ["x", "y"]}), tmp_path / "1.parquet")
    with pytest.raises(CorruptShardError, match=r"1\.parquet.*") as caught:
        open_tar(tmp_path, "*.parquet")
    assert "0.parquet" in str(caught.value) + "".join(getattr(caught.value, "__notes__", []))


@pytest.mark.parametrize(
    ("other", "cure"),
    [
        (pa.timestamp("ms", "UTC"), ": times with a zone and times without one are never the same; leave it"),
        (pa.date64(), "; leave it out"),
        (pa.int64(), "; leave it out"),
    ],
    ids=["a zone", "days", "numbers"],
)
@pytest.mark.parametrize("make", [pa.array, lambda v, t: pa.array([v], pa.list_(t))], ids=["scalar", "list"])
def test_times_beside_what_means_another_time_are_another_type(
    tmp_path: Path, make: Any, other: pa.DataType, cure: str
) -> None:
    pq.write_table(pa.table({"a": make([1], pa.timestamp("ms"))}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"a": make([1], other)}), tmp_path / "1.parquet")
    with pytest.raises(
        CorruptShardError, match=rf"here but .*int64 \(timestamp\[ms\]\) in .*0\.parquet{cure}"
    ):
        open_tar(tmp_path, "*.parquet")


def test_times_of_one_unit_in_two_zones_are_one_type(tmp_path: Path) -> None:
    for i, kind in enumerate([pa.timestamp("ms", "Europe/Berlin"), pa.timestamp("ms", "UTC")]):
        pq.write_table(pa.table({"a": pa.array([i], kind)}), tmp_path / f"{i}.parquet")
    assert len(open_tar(tmp_path, "*.parquet")) == 2


# ---- shards that change or vanish ---------------------------------------------------------------------


@pytest.fixture
def ints(tmp_path: Path) -> Made:
    return make_ints_tar(tmp_path)


def assert_fails_then_recovers(loader: DataLoader, error: type[Exception], match: str) -> None:
    """The error comes out, no thread is left, and the state before it is still good."""
    with pytest.raises(error, match=match):
        list(loader)
    assert our_threads() == []
    assert loader.state_dict()["epoch"] == 0


def test_a_shard_deleted_after_indexing_is_named(ints: Made) -> None:
    dataset = ints.open()
    ints.shards[1].unlink()
    with DataLoader(dataset, 4) as loader:
        assert_fails_then_recovers(loader, ShardReadError, "shard-1.tar.*no such file")


def test_batches_before_a_missing_shard_are_delivered(ints: Made) -> None:
    dataset = ints.open()
    ints.shards[-1].unlink()
    got: list[Any] = []
    with DataLoader(dataset, 4, Shuffle("none", 1)) as loader:
        with pytest.raises(ShardReadError, match="shard-2"):
            got.extend(rows_of(batch) for batch in loader)
        state = loader.state_dict()
        oracle = by_plan(loader, ints.samples, 0)
    assert got == oracle[: len(got)]
    assert state["position"] == 4 * len(got)
    assert len(got) == 20 // 4  # shards 0 and 1 hold 5 + 15 samples


def test_a_shard_that_comes_back_can_be_resumed_from_the_state(ints: Made) -> None:
    dataset = ints.open()
    away = ints.shards[-1].rename(ints.folder / "away")
    got: list[Any] = []
    with DataLoader(dataset, 4, Shuffle("none", 1)) as loader:
        with pytest.raises(ShardReadError):
            got.extend(rows_of(batch) for batch in loader)
        away.rename(ints.folder / "shard-2.tar")
        loader.load_state_dict(loader.state_dict())
        assert got + delivered(loader) == by_plan(loader, ints.samples, 0)


class Forbidding(MemoryFileSystem):
    """A memory store that refuses shards named in `refused`."""

    protocol = "forbidding"
    store: dict[str, Any] = {}  # noqa: RUF012
    pseudo_dirs = [""]  # noqa: RUF012
    refused: set[str] = set()  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("forbidding://").lstrip("/")

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> bytes:
        if any(path.endswith(name) for name in self.refused):
            raise PermissionError(f"you shall not read {path}")
        return super().cat_file(path, start, end, **kwargs)


@pytest.fixture
def forbidding() -> Iterator[type[Forbidding]]:
    fsspec.register_implementation("forbidding", Forbidding, clobber=True)
    yield Forbidding
    Forbidding.refused = set()
    Forbidding.store.clear()


@pytest.mark.reads_here
def test_permission_denied_is_said(tmp_path: Path, forbidding: type[Forbidding]) -> None:
    write_tar(tmp_path / "a.tar", [(f"{i}.cls", b"1") for i in range(9)])
    forbidding().pipe_file("/a.tar", (tmp_path / "a.tar").read_bytes())
    dataset = ShardedDataset("forbidding://a.tar", catalog=str(tmp_path / "c"))
    with DataLoader(dataset, 3) as loader:
        assert len(list(loader)) == 3
    forbidding.refused = {"a.tar"}
    with DataLoader(dataset, 3) as loader:
        assert_fails_then_recovers(loader, ShardReadError, "a.tar.*permission denied")


@pytest.mark.parametrize("maker", [make_ints_tar, make_parquet, make_tokens_bin, make_jsonl])
def test_a_shard_of_the_same_size_but_another_time_is_refused(tmp_path: Path, maker: Any) -> None:
    made = maker(tmp_path)
    dataset = made.open()
    shard = made.shards[1]
    shard.write_bytes(shard.read_bytes())
    os.utime(shard, ns=(1, 1))
    with DataLoader(dataset, 4) as loader:
        assert_fails_then_recovers(loader, ShardChangedError, "modification time is 1;")


def test_the_first_errors_are_listed_and_all_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "LISTED_ERRORS", 3)
    budget = deliveries.ErrorBudget("skip", 9)
    pending = deliveries.PendingErrors(budget)
    for batch in ("ab", "cd", "ef"):
        pending.delivered([SampleError(name, "bad") for name in batch])
    assert ([text[0] for text in budget.errors], budget.count) == (["a", "b", "c"], 6)


def test_a_shard_that_shrinks_in_place_is_refused(ints: Made) -> None:
    dataset = ints.open()
    times = ints.shards[2].stat()
    os.truncate(ints.shards[2], 3000)
    os.utime(ints.shards[2], ns=(times.st_atime_ns, times.st_mtime_ns))
    with DataLoader(dataset, 4) as loader:
        assert_fails_then_recovers(loader, ShardChangedError, "its size is 3000 bytes")


def test_a_shard_replaced_between_epochs_is_refused_when_it_is_read_again(ints: Made) -> None:
    with DataLoader(ints.open(), 4, Shuffle("window", 2), depth=1) as loader:
        oracle = by_plan(loader, ints.samples, 0)
        got = [rows_of(batch) for batch in islice(loader, len(oracle))]
        assert got == oracle
        loader.close()
        new = ints.folder / "new"
        new.write_bytes(ints.shards[1].read_bytes())
        os.utime(new, ns=(5, 5))
        new.rename(ints.shards[1])
        with pytest.raises(ShardChangedError, match="shard-1"):
            list(loader)


def test_a_changed_shard_is_indexed_again_with_a_warning(ints: Made) -> None:
    ints.open()
    write_tar(ints.shards[0], [("a.cls", b"100")])
    with pytest.warns(UserWarning, match="1 of 3 shards changed.*shard-0"):
        dataset = ints.open()
    assert len(dataset) == NUM_SAMPLES - 5 + 1


# ---- bad samples --------------------------------------------------------------------------------------


def corrupt_images(folder: Path, num: int, bad: set[int]) -> ShardedDataset:
    cv2 = pytest.importorskip("cv2")
    pytest.importorskip("simplejpeg")
    pixels = np.random.default_rng(0).integers(0, 255, (32, 32, 3), dtype=np.uint8)
    good = cv2.imencode(".jpg", pixels)[1].tobytes()
    members = []
    for i in range(num):
        data = b"no image at all" if i in bad else good
        members += [(f"{i:03d}.cls", str(i).encode()), (f"{i:03d}.jpg", data)]
    write_tar(folder / "a.tar", members)
    return open_tar(folder, decode={"jpg": Image(size=16), "cls": "int"}, block_bytes=4000)


def test_a_corrupt_image_raises_with_shard_and_key(tmp_path: Path) -> None:
    dataset = corrupt_images(tmp_path, 20, {7})
    with DataLoader(dataset, 4) as loader, pytest.raises(SampleError, match=r"a\.tar") as caught:
        list(loader)
    assert caught.value.key in ("007", "7")
    assert caught.value.stage == "decode"
    assert caught.value.__cause__ is not None


def test_skipped_samples_are_counted_and_listed(tmp_path: Path) -> None:
    bad = {3, 7, 8, 19}
    dataset = corrupt_images(tmp_path, 20, bad)
    dataset.on_error = "skip"
    with DataLoader(dataset, 4) as loader:
        got = sorted(int(i) for batch in loader for i in batch["cls"])
        stats = loader.stats()
        assert all(len(b["cls"]) == len(b["jpg"]) for b in loader)
    assert got == [i for i in range(20) if i not in bad]
    assert stats.samples == 16
    assert stats.skipped_samples == 4  # though the next epoch may have begun
    assert len(stats.skipped) == stats.skipped_samples
    assert all("a.tar" in line for line in stats.skipped)


def test_only_skips_of_delivered_batches_are_in_stats_and_state(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [(f"{i:02d}.cls", b"x" if i % 4 == 0 else b"1") for i in range(40)])
    dataset = open_tar(tmp_path, decode={"cls": "int"}, on_error="skip", block_bytes=2048)
    with DataLoader(dataset, 4, shuffle=False) as loader:
        for number, _ in enumerate(loader, 1):
            assert loader.state_dict()["skipped_samples"] == number
            assert loader.stats().skipped_samples == number
        state = loader.state_dict()
    assert state["skipped_samples"] == 10
    with DataLoader(dataset, 4, shuffle=False) as loader:
        loader.load_state_dict(edited(state, epoch=0, position=20, skipped_samples=5))
        list(loader)
        assert loader.state_dict()["skipped_samples"] == 10


def test_a_budget_that_is_used_up_raises_the_next_error(tmp_path: Path) -> None:
    dataset = corrupt_images(tmp_path, 20, {3, 7, 8})
    dataset.on_error, dataset.error_budget = "skip", 2
    with DataLoader(dataset, 4, shuffle=False) as loader, pytest.raises(SampleError) as caught:
        list(loader)
    assert any("2 samples were skipped before; error_budget=2" in n for n in caught.value.__notes__)


def test_a_function_may_decide_which_errors_to_skip(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("0.cls", b"x"), ("1.cls", b"1"), ("2.cls", b"2")])
    seen: list[SampleError] = []
    dataset = open_tar(tmp_path, decode={"cls": "int"}, on_error=lambda e: not seen.append(e))
    with DataLoader(dataset, 3, shuffle=False) as loader:
        assert next(iter(loader))["cls"].tolist() == [1, 2]
    assert seen[0].key == "0"


def test_a_batch_of_which_nothing_is_left_is_missing_and_never_empty(tmp_path: Path) -> None:
    """The mean loss of an empty one is NaN. With several ranks: test_empty_batches.py."""
    write_tar(tmp_path / "a.tar", [(f"{i}.cls", b"x" if i < 4 else b"1") for i in range(8)])
    dataset = open_tar(tmp_path, decode={"cls": "int"}, on_error="skip")
    with DataLoader(dataset, 4, shuffle=False) as loader:
        assert [len(batch["cls"]) for batch in loader] == [4]


def test_arrays_beside_a_skipped_one_are_stacked_all_the_same(tmp_path: Path) -> None:
    arrays = [npy(np.full(3, i)) for i in range(4)]
    for bad in (0, 2):
        broken = b"broken".ljust(len(arrays[0]))  # of as many bytes: such arrays are stacked
        members = [(f"{i}.npy", broken if i == bad else arrays[i]) for i in range(4)]
        write_tar(tmp_path / f"{bad}.tar", members)
        dataset = ShardedDataset(
            str(tmp_path / f"{bad}.tar"), catalog=str(tmp_path / f"{bad}.c"), on_error="skip"
        )
        with DataLoader(dataset, 4, shuffle=False) as loader:
            batch = next(iter(loader))
        assert isinstance(batch["npy"], torch.Tensor)
        assert batch["npy"][:, 0].tolist() == [i for i in range(4) if i != bad]


def test_samples_that_lack_a_column_are_bad_samples(tmp_path: Path) -> None:
    members = [m for i in range(10) for m in ((f"{i}.cls", str(i).encode()), (f"{i}.bin", b"ab"))]
    del members[7]  # sample 3 has no .bin
    write_tar(tmp_path / "a.tar", members)
    for _ in range(2):  # indexed, and from the catalog that was kept
        with pytest.raises(SampleError, match=r"a\.tar, sample '3': .*no member '3\.bin'") as caught:
            DataLoader(open_tar(tmp_path))
        assert (caught.value.key, caught.value.stage) == ("3", "plan")
    with DataLoader(open_tar(tmp_path, on_error="skip"), 4, shuffle=False) as loader:
        assert [batch["cls"].tolist() for batch in loader] == [[0, 1, 2], [4, 5, 6, 7], [8, 9]]
    with DataLoader(open_tar(tmp_path, columns=["cls"]), 10, shuffle=False) as loader:
        assert next(iter(loader))["cls"].tolist() == list(range(10))


def test_a_shard_of_other_members_is_named_when_a_loader_is_made(tmp_path: Path) -> None:
    for name, extensions in (("0", ("cls", "jpg")), ("1", ("cls", "png")), ("2", ("cls", "jpg"))):
        members = [(f"{name}{i}.{e}", b"1") for i in range(3) for e in extensions]
        write_tar(tmp_path / f"{name}.tar", members)
    for _ in range(2):
        with pytest.raises(SampleError, match=r"1\.tar: .* no sample has a member 'jpg', which samples of"):
            DataLoader(open_tar(tmp_path, "*.tar"))
        with pytest.raises(
            SampleError, match=r"0\.tar: column 'picture': no sample has a member 'png', which"
        ):
            DataLoader(open_tar(tmp_path, "*.tar", columns={"picture": "png"}, decode=None))
    for options in ({"columns": ["cls"]}, {"on_error": "skip"}, {"on_error": lambda error: True}):
        assert len(DataLoader(open_tar(tmp_path, "*.tar", **options))) == 9


def test_a_shard_without_samples_lacks_no_member(tmp_path: Path) -> None:
    write_tar(tmp_path / "0.tar", [("README", b"x")])
    write_tar(tmp_path / "1.tar", [("0.cls", b"1")])
    assert len(open_tar(tmp_path, "*.tar")) == 1


def test_the_first_sample_that_lacks_a_member_is_named(tmp_path: Path) -> None:
    for number, missing in (("0", []), ("1", ["14.cls", "17.cls", "19.txt"])):
        names = [f"{number}{i}.{e}" for i in range(10) for e in ("cls", "txt")]
        write_tar(tmp_path / f"{number}.tar", [(name, b"1") for name in names if name not in missing])
    with pytest.raises(SampleError, match=r"1\.tar, sample '14': .* '14\.cls'"):
        DataLoader(open_tar(tmp_path, "*.tar"))
    with pytest.raises(SampleError, match=r"1\.tar, sample '19': .* '19\.txt'"):
        DataLoader(open_tar(tmp_path, "*.tar", columns=["txt"]))


def test_an_exception_in_a_transform_keeps_its_cause_and_names_the_sample(ints: Made) -> None:
    def transform(sample: dict[str, Any]) -> Any:
        return 1 // (sample["cls"] - 13)

    with DataLoader(ints.open(transform=transform), 4) as loader, pytest.raises(SampleError) as caught:
        list(loader)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.stage == "transform"
    assert caught.value.key == "00013"
    assert caught.value.reason.startswith("ZeroDivisionError: ")
    assert our_threads() == []
    dataset = ints.open(transform=transform, on_error="skip")
    with DataLoader(dataset, 50, shuffle=False) as loader:
        assert len(next(iter(loader))) == NUM_SAMPLES - 1
        assert loader.stats().skipped[0].startswith(str(ints.shards[1]))


@pytest.mark.parametrize("where", ["collate_fn", "batch_transform"])
def test_an_exception_in_a_function_of_batches_comes_out_as_it_is(ints: Made, where: str) -> None:
    def fail(_: Any) -> Any:
        raise LookupError("mine")

    dataset = ints.open(batch_transform=fail) if where == "batch_transform" else ints.open()
    options = {"collate_fn": fail} if where == "collate_fn" else {}
    with DataLoader(dataset, 4, **options) as loader:
        assert_fails_then_recovers(loader, LookupError, "mine")


@pytest.mark.parametrize("where", ["collate_fn", "batch_transform"])
def test_a_stop_iteration_of_a_function_of_batches_does_not_look_like_an_end(ints: Made, where: str) -> None:
    def empty(_: Any) -> Any:
        return next(iter(()))

    dataset = ints.open(batch_transform=empty) if where == "batch_transform" else ints.open()
    options = {"collate_fn": empty} if where == "collate_fn" else {}
    with DataLoader(dataset, 4, **options) as loader:
        assert_fails_then_recovers(loader, RuntimeError, "empty raised StopIteration")


# ---- memory -------------------------------------------------------------------------------------------


@pytest.mark.reads_here
def test_a_window_larger_than_the_limit_says_what_would_fit(ints: Made) -> None:
    with (
        DataLoader(ints.open(), 4, Shuffle("window", 100), memory_limit=20_000) as loader,
        pytest.raises(MemoryLimitError, match=r"raise memory_limit to [\d,]+ \(at least.*window_blocks"),
    ):
        list(loader)
    assert our_threads() == []


def test_a_batch_of_variable_size_larger_than_the_limit_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [(f"{i}.bin", b"x" * (1000 + i)) for i in range(100)])
    dataset = open_tar(tmp_path, block_bytes=3000)
    with (
        DataLoader(dataset, 90, Shuffle("window", 2), memory_limit=60_000) as loader,
        pytest.raises(MemoryLimitError, match="memory_limit"),
    ):
        list(loader)


@pytest.mark.parametrize("maker", [make_tar, make_parquet, make_tokens_bin], ids=["tar", "parquet", "tokens"])
def test_a_full_shuffle_takes_as_many_samples_at_a_time_as_fit(tmp_path: Path, maker: Any) -> None:
    made = maker(tmp_path, 300)
    with DataLoader(made.open(), 4, Shuffle("full"), memory_limit=120_000) as loader:
        assert delivered(loader) == by_plan(loader, made.samples, 0)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes in states other than IN_USE, after every change of any ledger."""
    seen: list[int] = []
    add = Ledger._add

    def watch(self: Ledger, state: State, nbytes: int) -> None:
        add(self, state, nbytes)
        seen.append(sum(held for s, held in self._held.items() if s is not State.IN_USE))

    monkeypatch.setattr(Ledger, "_add", watch)
    return seen


@pytest.fixture
def charged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes that were charged where they were there already, as those of text are."""
    seen: list[int] = [0]
    charge = Ledger.charge

    def watch(self: Ledger, state: State, nbytes: int) -> None:
        seen.append(nbytes)
        charge(self, state, nbytes)

    monkeypatch.setattr(Ledger, "charge", watch)
    return seen


@pytest.mark.parametrize("maker", [make_tar, make_parquet, make_tokens_bin], ids=["tar", "parquet", "tokens"])
@pytest.mark.parametrize("keep", [False, True], ids=["dropped", "kept"])
def test_a_small_limit_holds_and_changes_nothing(
    tmp_path: Path, watched: list[int], charged: list[int], maker: Any, keep: bool
) -> None:
    made = maker(tmp_path)
    limit = 200_000
    with DataLoader(made.open(), 4, Shuffle("window", 2), memory_limit=limit) as loader:
        for epoch in range(3):
            kept = [batch if keep else rows_of(batch) for batch in loader]
            got = [rows_of(batch) for batch in kept] if keep else kept
            assert got == by_plan(loader, made.samples, epoch)
        builders = loader.stats().num_workers
    assert 0 < max(watched) <= limit + builders * max(charged)  # see `MemoryHeld.limit_bytes`


@pytest.mark.here
@pytest.mark.parametrize("maker", [make_tar, make_parquet, make_tokens_bin], ids=["tar", "parquet", "tokens"])
def test_the_limit_that_the_errors_ask_for_is_enough_and_is_kept(
    tmp_path: Path, watched: list[int], charged: list[int], maker: Any
) -> None:
    made, limit, asked = maker(tmp_path, 200), 5000, 0
    dataset = made.open()
    while True:
        watched.clear()
        try:
            with DataLoader(dataset, 4, Shuffle("window", 3), memory_limit=limit) as loader:
                assert delivered(loader) == by_plan(loader, made.samples, 0)
                builders = loader.stats().num_workers
            break
        except MemoryLimitError as error:
            found = re.search(r"(?:memory_limit to|samples needs) ([\d,]+)", str(error))
            assert found is not None
            wanted, asked = int(found[1].replace(",", "")), asked + 1
            assert wanted > limit
            limit = wanted
    assert limit / 3 < max(watched) <= limit + builders * max(charged)  # see `MemoryHeld.limit_bytes`
    assert asked <= 2  # the batch, which is known when the loader is made, and then the rest


@pytest.mark.here
@pytest.mark.parametrize("share", [0.2, 0.3, 0.4])
def test_windows_read_ahead_do_not_take_the_room_of_the_next_batch(tmp_path: Path, share: float) -> None:
    """What fits alone must be delivered: a window of 0.22 and a batch of up to 0.4 of the limit do."""
    rows, row_bytes, window_rows = 400, 4100, 20
    np.arange(rows * 1024 + 1, dtype=np.int32).tofile(tmp_path / "t.bin")
    options: dict[str, Any] = {"format": "tokens", "dtype": "int32", "length": 1024, "block_bytes": 4 * 4096}
    dataset = ShardedDataset(str(tmp_path / "t.bin"), catalog=str(tmp_path / "c"), **options)
    limit = int(window_rows * row_bytes / 0.22)
    batch_size = int(share * limit / (2 * row_bytes))  # rows are delivered as int64
    for _ in range(5):
        with DataLoader(dataset, batch_size, Shuffle("window", 5), memory_limit=limit) as loader:
            assert sum(len(batch["tokens"]) for batch in loader) == rows


# ---- interruption -------------------------------------------------------------------------------------


def test_ctrl_c_inside_a_batch_leaves_no_thread_and_a_good_state(ints: Made) -> None:
    """The signal comes while the consumer waits for a batch that a transform holds back."""
    waiting, gate = threading.Event(), threading.Event()

    def transform(sample: dict[str, Any]) -> Any:
        if sample["cls"] == 30:
            waiting.set()
            gate.wait(10)
        return sample

    def interrupt() -> None:
        waiting.wait(10)
        os.kill(os.getpid(), signal.SIGINT)
        gate.set()

    got: list[Any] = []
    with DataLoader(
        ints.open(transform=transform), 4, Shuffle("none", 1), num_workers=1, workers="thread"
    ) as loader:
        pressing = threading.Thread(target=interrupt)
        pressing.start()
        with pytest.raises(KeyboardInterrupt):
            got.extend(rows_of(batch) for batch in chain(loader, loader))
        pressing.join()
        assert threads_left() == []
        state = loader.state_dict()
        oracle = by_plan(loader, ints.samples, 0)
        assert state["epoch"] == 0
        assert got == oracle[: len(got)]
        # The batch that was just handed out when the signal came counts as delivered.
        done = state["position"] // 4
        assert done - len(got) in (0, 1)
        loader.load_state_dict(state)
        assert delivered(loader) == oracle[done:]


@pytest.mark.here
def test_a_batch_that_does_not_come_in_time_is_an_error_even_if_its_transform_hangs(
    ints: Made, capfd: pytest.CaptureFixture[str]
) -> None:
    gate, raised = threading.Event(), threading.Event()
    caught: list[BaseException] = []

    def transform(sample: dict[str, Any]) -> Any:
        gate.wait(40)
        return sample

    def consume() -> None:
        try:
            list(loader)
        except StallError as error:
            caught.append(error)
            raised.set()

    loader = DataLoader(ints.open(transform=transform), 4, timeout=1)  # a builder is there within a second
    consumer = threading.Thread(target=consume)
    consumer.start()
    came = raised.wait(20)
    gate.set()
    consumer.join()
    loader.close()
    for thread in threading.enumerate():
        if thread.name.startswith("dataflow"):
            thread.join(10)
    assert came, "the error waited for the transform"
    assert re.search(r"no batch within .* being built, in .*transform \(.*, line \d+\)", str(caught[0]))
    assert "most recent call first" not in capfd.readouterr().err, "the place in the code says it"


def test_a_garbage_collected_loader_does_not_disturb_its_own_worker(ints: Made) -> None:
    """A loader in a reference cycle may be collected in one of its own threads."""
    import gc

    class Trainer:
        pass

    begun, gate, calls = threading.Event(), threading.Event(), count()
    failures: list[Any] = []
    gone: Callable[[], Any] = Trainer

    def transform(sample: dict[str, Any]) -> Any:
        if next(calls) < 2 * NUM_SAMPLES:
            return sample
        begun.set()  # the third epoch is read ahead, and no loop runs
        # Not once more than needed: with all tests' objects it takes a second. It does nothing, though, while
        # another thread collects.
        if gate.wait(30) and gone() is not None:
            gc.collect()
        return sample

    hook, threading.excepthook = threading.excepthook, failures.append
    try:
        trainer: Any = Trainer()
        trainer.me = trainer
        trainer.loader = DataLoader(ints.open(transform=transform), 4, num_workers=1, workers="thread")
        assert len(list(trainer.loader)) == 12  # building ahead begins with a second epoch
        trainer.batches = iter(trainer.loader)
        assert len(list(trainer.batches)) == 12
        assert begun.wait(10)
        threads = our_threads()
        gc.disable()
        gone = weakref.ref(trainer)
        del trainer
        gate.set()
        for thread in threads:
            thread.join(30)
        assert gone() is None
        assert not any(thread.is_alive() for thread in threads)
    finally:
        gc.enable()
        threading.excepthook = hook
    assert failures == []


def one_rank_dies(source: str, catalog: str) -> int:
    """Rank 1 is killed in the middle; the other one meets the collective's error."""
    torch.distributed.barrier()
    with DataLoader(ShardedDataset(source, catalog=catalog), 4) as loader:
        for step, batch in enumerate(loader):
            if step == 2 and torch.distributed.get_rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            torch.distributed.all_reduce(batch["cls"].sum())
    return len(loader)


def rows_of_a_rank(source: str, catalog: str) -> list[Any]:
    with DataLoader(
        ShardedDataset(source, catalog=catalog), 4, Shuffle("window", 2), tail="uneven"
    ) as loader:
        return [batch["cls"].tolist() for batch in loader]


def test_a_killed_rank_is_reported_and_nothing_hangs(ints: Made) -> None:
    ints.open()
    with pytest.raises((RankError, RuntimeError)):
        fast_ranks(one_rank_dies, 2, args=(ints.kwargs["source"], ints.kwargs["catalog"]), timeout_s=60)


def test_real_ranks_find_their_own_place_and_share_the_epoch(ints: Made) -> None:
    ints.open()
    ranks = fast_ranks(rows_of_a_rank, 2, args=(ints.kwargs["source"], ints.kwargs["catalog"]), timeout_s=60)
    for r, got in enumerate(ranks):
        with DataLoader(ints.open(), 4, Shuffle("window", 2), tail="uneven", topology=rank(r, 2)) as loader:
            assert got == [[row["cls"] for row in batch] for batch in by_plan(loader, ints.samples, 0)]
