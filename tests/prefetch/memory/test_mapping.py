"""Mapped shards: what the kernel copies from them, what is noticed, and what stays mapped."""

from __future__ import annotations

import gc
import itertools
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from dataflow import DataLoader, Shuffle
from dataflow.decode.values import BadRows, parse_ints
from prefetch.memory import mapping as module
from prefetch.memory.mapping import MappedShard, Mappings, can_map, touch_pages, will_need
from prefetch.memory.spans import copies_by_kernel, copy_mapped
from sharding.blocks import Shard, Spans
from sharding.catalog.storage import local_info
from sharding.errors import ShardChangedError, ShardReadError
from tests.datasets_kit import make_ints_tar, make_tar, make_tokens_bin

PAGE = os.sysconf("SC_PAGE_SIZE")
CONTENT = np.random.default_rng(0).integers(0, 256, 8 * PAGE + 100, np.uint8).tobytes()

pytestmark = pytest.mark.skipif(
    not copies_by_kernel(), reason="process_vm_readv is missing or forbidden here"
)


@pytest.fixture
def shard(tmp_path: Path) -> Shard:
    path = tmp_path / "shard.bin"
    path.write_bytes(CONTENT)
    return shard_of(path)


def shard_of(path: Path) -> Shard:
    seen = os.stat(path)
    info = local_info(seen)
    return Shard(str(path), int(info["size"]), f"mtime:{seen.st_mtime_ns}")


def copied(mapped: MappedShard, start: int, length: int) -> bytes:
    out = np.zeros(length, np.uint8)
    assert copy_mapped(np.array([[mapped.address + start, length]]), out) == 1
    return out.tobytes()


def mapped_files() -> int:
    return sum("shard.bin" in line for line in Path("/proc/self/maps").read_text().splitlines())


def resident_kb() -> int:
    """Of the mapped shard."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if "shard.bin" in line)
    return next(int(line.split()[1]) for line in lines[at:] if line.startswith("Rss:"))


@pytest.mark.parametrize("start", [0, 1, PAGE - 1, PAGE, 8 * PAGE + 99])
def test_any_range_of_a_mapped_shard_is_the_slice_of_the_content(shard: Shard, start: int) -> None:
    mapped = MappedShard(shard)
    mapped.populate(start, len(CONTENT) - start, ahead=True)
    assert copied(mapped, start, len(CONTENT) - start) == CONTENT[start:]


def test_a_shard_is_unmapped_when_the_last_reference_dies_and_holds_no_descriptor(shard: Shard) -> None:
    before = len(os.listdir("/proc/self/fd"))
    mappings = Mappings()
    mapped = mappings.get(shard)
    assert mappings.get(shard) is mapped
    assert len(os.listdir("/proc/self/fd")) == before
    assert mapped_files() == 1
    del mappings
    gc.collect()
    assert copied(mapped, 0, 10) == CONTENT[:10]
    del mapped
    gc.collect()
    assert mapped_files() == 0


def test_a_truncated_shard_is_an_error_not_a_signal(shard: Shard) -> None:
    mapped = MappedShard(shard)
    os.truncate(shard.url, 2 * PAGE)
    with pytest.raises(ShardReadError, match="truncated") as caught:
        mapped.populate(PAGE, 4 * PAGE, ahead=True)
    assert (caught.value.shard, caught.value.offset) == (shard.url, PAGE)
    with pytest.raises(ShardChangedError):
        mapped.check()


def test_a_shard_that_is_not_the_indexed_one_is_refused(shard: Shard) -> None:
    Path(shard.url).write_bytes(CONTENT[::-1])
    os.utime(shard.url, ns=(1, 1))
    with pytest.raises(ShardChangedError, match="modification time"):
        MappedShard(shard)


def test_a_missing_shard_is_named(shard: Shard) -> None:
    os.unlink(shard.url)
    with pytest.raises(ShardReadError, match="no such file") as caught:
        MappedShard(shard)
    assert caught.value.shard == shard.url


def test_a_shard_replaced_by_rename_serves_the_old_bytes_and_is_noticed(shard: Shard, tmp_path: Path) -> None:
    mapped = MappedShard(shard)
    other = tmp_path / "other"
    other.write_bytes(bytes(len(CONTENT)))
    os.utime(other, ns=(5, 5))
    other.replace(shard.url)
    assert copied(mapped, 0, len(CONTENT)) == CONTENT
    with pytest.raises(ShardChangedError):
        mapped.check()


def test_ranges_that_no_window_uses_leave_the_process_oldest_first(shard: Shard) -> None:
    mappings = Mappings(keep_bytes=3 * PAGE)
    mapped = mappings.get(shard)
    for start in (0, 2, 4, 6):
        mappings.populate(mapped, start * PAGE, 2 * PAGE)
    used = resident_kb()
    for start in (0, 2):
        mappings.leave(mapped, start * PAGE, 2 * PAGE)
    assert used - resident_kb() == 2 * PAGE // 1024
    assert copied(mapped, 0, len(CONTENT)) == CONTENT


def test_a_range_that_two_windows_left_counts_once(shard: Shard) -> None:
    mappings = Mappings(keep_bytes=3 * PAGE)
    mapped = mappings.get(shard)
    mappings.populate(mapped, 0, len(CONTENT))
    used = resident_kb()
    for _ in range(5):
        mappings.leave(mapped, 0, 2 * PAGE)
        mappings.leave(mapped, 0, 2 * PAGE)
        mappings.populate(mapped, 0, 2 * PAGE)
    mappings.leave(mapped, 0, 2 * PAGE)
    assert resident_kb() == used
    mappings.leave(mapped, 4 * PAGE, 2 * PAGE)
    assert used - resident_kb() == 2 * PAGE // 1024


def test_pages_may_be_asked_for_without_waiting(shard: Shard) -> None:
    mapped = MappedShard(shard)
    starts = np.arange(0, len(CONTENT), 7, dtype=np.int64)
    will_need(mapped.address + starts, np.full(len(starts), 5))
    assert copied(mapped, 0, 100) == CONTENT[:100]


def test_only_local_files_are_mapped() -> None:
    assert can_map("/data/x.tar")
    assert not can_map("memory://x.tar")


# ---- windows of mapped shards ------------------------------------------------------------------------------


def test_a_shard_written_in_place_while_its_window_is_open_is_an_error(tmp_path: Path) -> None:
    made = make_tokens_bin(tmp_path)
    path = next(tmp_path.glob("*.bin"))
    with DataLoader(made.open(), 1, shuffle=False, depth=1) as loader:
        batches = iter(loader)
        next(batches)
        os.utime(path, ns=(7, 7))
        with pytest.raises(ShardChangedError):
            list(itertools.chain(batches, *[loader] * 20))


def test_a_full_shuffle_parses_the_numbers_of_its_own_samples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []

    def counting(column: Spans) -> tuple[NDArray[np.int64], BadRows]:
        parsed.append(len(column))
        return parse_ints(column)

    monkeypatch.setattr("dataflow.batch.resolve.parse_ints", counting)
    monkeypatch.setattr("dataflow.staging.stager._FULL_WINDOW_SAMPLES", 2)
    made = make_ints_tar(tmp_path)
    with DataLoader(made.open(), 1, Shuffle("full")) as loader:
        seen = sorted(int(batch["cls"]) for batch in loader)
    assert seen == [row["cls"] for row in made.samples]
    assert max(parsed) == 2


@pytest.mark.parametrize("kind", ["window", "full", "none"])
def test_mapped_and_staged_windows_deliver_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    made = make_tar(tmp_path)
    seen = []
    for mapping in (True, False):
        if not mapping:
            monkeypatch.setattr("dataflow.staging.stager.can_map_windows", lambda source: False)
        with DataLoader(made.open(), 3, Shuffle(kind)) as loader:  # type: ignore[arg-type]
            seen.append([repr(batch) for batch in loader])
    assert seen[0] == seen[1]


# ---- memory to be written ----------------------------------------------------------------------------------


def test_pages_are_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[int] = []

    class Libc:
        def madvise(self, start: int, nbytes: int, advice: int) -> int:
            advised.append(nbytes)
            return int(libc.madvise(start, nbytes, advice))

    libc = module._libc()
    monkeypatch.setattr(module, "_libc", Libc)
    with mmap.mmap(-1, 64 * mmap.PAGESIZE) as fresh:
        memory = np.frombuffer(fresh, np.uint8)
        memory[0] = 1  # one page is there, the others are not
        touch_pages(memory)
        assert advised == [memory.nbytes]
        memory[:] = 1  # what the advice does, where the kernel knows it
        touch_pages(memory)
        assert advised == [memory.nbytes]
        del memory
