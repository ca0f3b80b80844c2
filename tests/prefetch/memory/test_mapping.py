"""Mapped shards: what the kernel copies from them, what is noticed, and what stays mapped."""

from __future__ import annotations

import errno
import gc
import itertools
import mmap
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import fsspec
import numpy as np
import pytest
from datasets_kit import Made, make_tar, make_tokens_bin
from numpy.typing import NDArray

from dataflow import DataLoader, ShardedDataset, ShardWriter, Shuffle
from dataflow.decode.values import BadRows, parse_ints
from dataflow.staging import locator
from prefetch.core.copy_table import PlanColumn
from prefetch.core.kernels import kernels
from prefetch.core.pages import RangeFlag
from prefetch.memory.guards import FileGuards
from prefetch.memory.mapping import MappedShard, Mappings, can_map, touch_pages, will_need
from sharding.blocks import Shard, Spans
from sharding.catalog.storage import local_info
from sharding.errors import ShardChangedError, ShardReadError

PAGE = os.sysconf("SC_PAGE_SIZE")
CONTENT = np.random.default_rng(0).integers(0, 256, 8 * PAGE + 100, np.uint8).tobytes()

pytestmark = pytest.mark.skipif(
    not kernels().copies_by_kernel, reason="process_vm_readv is missing or forbidden here"
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
    address = np.array([mapped.address + start])
    column = PlanColumn(name="x", index=address, each=length, out=out, may_load=False)
    assert not kernels().run(1, [column]).any()
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
    mapped = Mappings().hold([(shard, start, len(CONTENT) - start)])[0]
    assert copied(mapped, start, len(CONTENT) - start) == CONTENT[start:]


def test_a_shard_is_unmapped_when_the_last_reference_dies_and_holds_no_descriptor(shard: Shard) -> None:
    before = len(os.listdir("/proc/self/fd"))
    mappings = Mappings()
    mapped = mappings.hold([(shard, 0, PAGE)])[0]
    assert mappings.hold([(shard, 0, PAGE), (shard, PAGE, PAGE)]) == [mapped, mapped]
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
    cut, checked = mapped.entry(PAGE, 4 * PAGE, RangeFlag.AHEAD), mapped.entry(0, PAGE, RangeFlag.CHECK)
    assert kernels().bring(np.array([cut, checked])).tolist() == [errno.EFAULT, -1]
    failure = mapped.failure(errno.EFAULT, PAGE)
    assert "truncated" in str(failure)
    assert (failure.shard, failure.offset) == (shard.url, PAGE)
    with pytest.raises(ShardChangedError):
        mapped.check()


def test_a_cut_file_is_told_as_changed_before_what_it_lacks(shard: Shard) -> None:
    mappings = Mappings()
    mappings.hold([(shard, 0, PAGE)])
    os.truncate(shard.url, 2 * PAGE)
    with pytest.raises(ShardChangedError, match="size"):
        mappings.hold([(shard, 4 * PAGE, PAGE), (shard, 0, PAGE)])


def test_pages_that_cannot_be_read_are_an_error_that_names_their_block(
    shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = SimpleNamespace(bring=lambda _: np.array([0, errno.EIO]))
    monkeypatch.setattr("prefetch.memory.mapping.kernels", lambda: failing)
    with pytest.raises(ShardReadError, match=os.strerror(errno.EIO)) as caught:
        Mappings().hold([(shard, 0, PAGE), (shard, PAGE, PAGE)])
    assert (caught.value.shard, caught.value.offset) == (shard.url, PAGE)


def test_files_are_checked_and_pages_brought_in(shard: Shard) -> None:
    mapped = MappedShard(shard)
    assert resident_kb() == 0
    mine = mapped.entry(0, 0, RangeFlag.CHECK), mapped.entry(PAGE + 5, 2 * PAGE, 0)
    assert kernels().bring(np.array([mapped.entry(0, len(CONTENT), RangeFlag.KEPT)])).tolist() == [0]
    assert resident_kb() == 0  # the page cache has them, and that is enough
    assert kernels().bring(np.array(mine)).tolist() == [0, 0]
    assert resident_kb() >= (3 * PAGE if knows_the_advice() else 0) // 1024  # some bring their neighbours
    os.utime(shard.url, ns=(7, 7))
    assert kernels().bring(np.array(mine)).tolist() == [-1, 0]
    os.unlink(shard.url)
    assert kernels().bring(np.array(mine)).tolist() == [-1, 0]


def test_a_file_whose_version_is_no_time_is_compared_by_its_size(shard: Shard) -> None:
    mappings = Mappings()
    assert mappings.hold([(replace(shard, version=""), 0, PAGE)])
    os.truncate(shard.url, 2 * PAGE)
    with pytest.raises(ShardChangedError, match="size"):
        mappings.hold([(replace(shard, version=""), 0, PAGE)])


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
    mapped = mappings.hold([(shard, start * PAGE, 2 * PAGE) for start in (0, 2, 4, 6)])[0]
    used = resident_kb()
    for start in (0, 2):
        mappings.release([(mapped, start * PAGE, 2 * PAGE)])
    assert used - resident_kb() == 2 * PAGE // 1024
    assert copied(mapped, 0, len(CONTENT)) == CONTENT


def test_a_range_that_two_windows_left_counts_once(shard: Shard) -> None:
    mappings = Mappings(keep_bytes=3 * PAGE)
    mapped = mappings.hold([(shard, 0, len(CONTENT))])[0]
    used = resident_kb()
    for _ in range(5):
        mappings.release([(mapped, 0, 2 * PAGE)])
        mappings.release([(mapped, 0, 2 * PAGE)])
        mappings.hold([(shard, 0, 2 * PAGE)])
    mappings.release([(mapped, 0, 2 * PAGE)])
    assert resident_kb() == used
    mappings.release([(mapped, 4 * PAGE, 2 * PAGE)])
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


@pytest.mark.parametrize("is_guarded", [True, False])
def test_a_window_compares_its_shards_again_at_its_end_unless_they_are_guarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_guarded: bool
) -> None:
    made, at_end, check = make_tokens_bin(tmp_path), list[MappedShard](), MappedShard.check
    guarded: list[bool] = []
    entry = MappedShard.entry

    def checked(mapped: MappedShard) -> None:
        at_end.append(mapped)
        check(mapped)

    def entered(mapped: MappedShard, offset: int, length: int, flags: int) -> tuple[int, ...]:
        if flags & RangeFlag.CHECK:
            guarded.append(mapped.guard is not None)
        return entry(mapped, offset, length, flags)

    monkeypatch.setattr(MappedShard, "check", checked)
    monkeypatch.setattr(MappedShard, "entry", entered)
    if not is_guarded:
        monkeypatch.setattr(FileGuards, "take", lambda *_: None)
    with DataLoader(made.open(), 1, shuffle=False) as loader:
        assert list(loader)
    if is_guarded and not any(guarded):
        pytest.skip("this filesystem grants no leases")
    assert guarded
    assert bool(at_end) != is_guarded


def test_a_full_shuffle_parses_the_numbers_of_its_own_samples_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[int] = []

    def counting(column: Spans) -> tuple[NDArray[np.int64], BadRows]:
        parsed.append(len(column))
        return parse_ints(column)

    monkeypatch.setattr("dataflow.outputs.resolve.parse_ints", counting)
    for start in (0, 6):
        with ShardWriter(f"{tmp_path}/{start}.tar") as writer:
            for i in range(start, start + 6):
                writer.write({"__key__": f"{i}", "bin": bytes(100_000), "cls": i})
    dataset = ShardedDataset(f"{tmp_path}/*.tar", decode={"cls": "int", "bin": None}, block_bytes=350_000)
    with DataLoader(dataset, 1, Shuffle("full"), memory_limit=1_700_000) as loader:  # two samples a window
        seen = sorted(int(batch["cls"]) for batch in loader)
    assert seen == list(range(12))
    assert max(parsed) == 2


@pytest.mark.parametrize("make", [make_tar, make_tokens_bin])
def test_windows_are_the_same_where_too_much_to_remember_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], Made]
) -> None:
    made, seen = make(tmp_path), []
    for limit in (locator._REMEMBERED_BYTES, 0):
        monkeypatch.setattr(locator, "_REMEMBERED_BYTES", limit)
        with DataLoader(made.open(), 3) as loader:
            seen.append([repr(batch) for _ in range(2) for batch in loader])
    assert seen[0] == seen[1]


@pytest.mark.parametrize("kind", ["window", "full", "none"])
def test_mapped_and_staged_windows_deliver_the_same(tmp_path: Path, kind: str) -> None:
    made = make_tar(tmp_path)
    memory = fsspec.filesystem("memory")
    for path in made.shards:
        memory.pipe_file(f"/mapping/{path.name}", path.read_bytes())
    seen = []
    for source in (made.kwargs["source"], "memory://mapping/*"):  # what is not local cannot be mapped
        with DataLoader(made.open(source=source), 3, Shuffle(kind)) as loader:  # type: ignore[arg-type]
            seen.append([repr(batch) for batch in loader])
    assert seen[0] == seen[1]
    memory.rm("/mapping", recursive=True)


# ---- memory to be written ----------------------------------------------------------------------------------


def kb_of(memory: NDArray[np.uint8], figure: str) -> int:
    """What the kernel tells of the mapping that some memory is."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith(f"{memory.ctypes.data:x}-"))
    return next(int(line.split()[1]) for line in lines[at:] if line.startswith(f"{figure}:"))


def test_pages_are_asked_for_where_some_are_missing() -> None:
    with mmap.mmap(-1, 64 * PAGE) as fresh:
        memory = np.frombuffer(fresh, np.uint8)
        memory[0] = 1
        touch_pages(memory)
        assert kb_of(memory, "Rss") == (64 * PAGE if knows_the_advice() else PAGE) // 1024
        del memory


def test_pages_that_are_there_are_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "pages").write_bytes(bytes(64 * PAGE))
    with open(tmp_path / "pages", "rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    with mapped:
        memory = np.frombuffer(mapped, np.uint8)
        assert memory.sum() == 0  # the file's pages, of which a write makes copies
        touch_pages(memory)
        assert (kb_of(memory, "Rss"), kb_of(memory, "Anonymous")) == (64 * PAGE // 1024, 0)
        del memory


def knows_the_advice() -> bool:
    return tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (5, 14)
