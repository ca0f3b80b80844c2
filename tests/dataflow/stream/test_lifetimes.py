"""Who keeps what alive: batches, slots, threads, descriptors, memory, and the interpreter at its end."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import traceback
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import (
    MAKERS,
    NUM_SAMPLES,
    Made,
    by_plan,
    delivered,
    make_ints_tar,
    make_parquet,
    make_tar,
    make_tokens_bin,
    rows_of,
    sort_key,
    write_tar,
)
from forked_kit import exit_code_in_child
from http_kit import slowstore
from loader_kit import num_leased_after_a_loop, session_of, stream_of
from parameters_kit import in_pairs
from programs_kit import run_script
from threads_kit import our_threads, threads_left

from dataflow import DataLoader, SampleError, ShardedDataset, Shuffle


def descriptors() -> dict[str, str]:
    """What each descriptor of this process leads to."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found[name] = os.readlink(f"/proc/self/fd/{name}")
    return found


@pytest.fixture
def ints(tmp_path: Path) -> Made:
    return make_ints_tar(tmp_path)


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    if our_threads():
        gc.collect()  # what holds their loop may be garbage; looking for it takes longer than most tests
    assert threads_left() == []


# ---- batches and their slots ----------------------------------------------------------------------------


@pytest.mark.one_in(3)
@pytest.mark.parametrize("maker", [make_tar, make_parquet, make_tokens_bin], ids=["tar", "parquet", "tokens"])
@pytest.mark.parametrize("limit", ["200kB", "1GB"])
def test_a_list_of_all_batches_keeps_every_one_intact(tmp_path: Path, maker: Any, limit: str) -> None:
    """Slots must not be reused while any of their views lives, however small the limit is."""
    made = maker(tmp_path)
    with DataLoader(made.open(), 4, Shuffle("window", 2), memory_limit=limit) as loader:
        epochs = [list(loader) for _ in range(3)]
        for epoch, batches in enumerate(epochs):
            assert [rows_of(batch) for batch in batches] == by_plan(loader, made.samples, epoch)
    for epoch, batches in enumerate(epochs):  # and after close
        assert [rows_of(batch) for batch in batches] == by_plan(loader, made.samples, epoch)


def fails(sample: dict[str, Any]) -> dict[str, Any]:
    """A transform whose errors have another behind them."""
    try:
        if int(sample["n"]) % 7 == 3:
            raise LookupError("not this one")
    except LookupError as error:
        raise ValueError("a bad one") from error
    return {"x": sample["x"] * 2}


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "workers": "thread"}])
def test_samples_that_are_left_out_keep_no_batch_until_garbage_is_collected(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """The frames of their errors, and those that had called them, had the batch; one had the error."""
    rows = pa.table({"x": [np.zeros(1000, np.float32)] * 64, "n": range(64)})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=16)
    dataset = ShardedDataset(str(tmp_path / "a.parquet"), transform=fails, on_error="skip")
    assert num_leased_after_a_loop(dataset, **options) <= 2  # what is read ahead


def test_one_row_of_a_batch_keeps_that_row(tmp_path: Path) -> None:
    made = make_tokens_bin(tmp_path)
    with DataLoader(made.open(), 4, shuffle=False, memory_limit="200kB") as loader:
        rows = [batch["tokens"][1, 2:] for batch in loader if len(batch["tokens"]) > 1]
        for _ in range(3):
            list(loader)
    assert [row.tolist() for row in rows] == [s["tokens"][2:] for s in made.samples[1::4]]


def is_mapped(array: np.ndarray[Any, Any]) -> bool:
    """Whether both ends of an array may be read: a process that reads elsewhere is ended."""
    begin = array.__array_interface__["data"][0]
    ranges = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    bounds = [(int(first, 16), int(last, 16)) for first, last in ranges]
    return all(any(a <= at < b for a, b in bounds) for at in (begin, begin + max(0, array.nbytes - 1)))


@pytest.mark.parametrize("num_workers", [0, 1, None], ids=["in next", "a process", "the default"])
def test_arrays_of_a_loader_that_was_closed_and_collected_are_intact(
    tmp_path: Path, num_workers: int | None
) -> None:
    made = make_tokens_bin(tmp_path)
    loader = DataLoader(made.open(), 4, shuffle=False, memory_limit="200kB", num_workers=num_workers)
    held = [batch["tokens"].numpy()[:, 1:] for batch in loader]
    died = weakref.ref(loader)
    loader.close()
    del loader
    gc.collect()
    assert died() is None
    assert all(is_mapped(array) for array in held)
    rows = [row for array in held for row in array.tolist()]
    assert rows == [sample["tokens"][1:] for sample in made.samples]


@pytest.mark.parametrize("store", ["file", "memory"])
def test_what_a_traceback_shows_of_a_closed_loader_is_still_there(tmp_path: Path, store: str) -> None:
    """Who shows the variables of an error's innermost function reads arrays over stored bytes."""
    damaged = b"\xff\xd8 this is no picture"
    write_tar(tmp_path / "a.tar", [("7.jpg", damaged)])
    if store == "memory":
        fsspec.filesystem("memory").pipe_file(f"{tmp_path}/a.tar", (tmp_path / "a.tar").read_bytes())
    url = f"{store}://{tmp_path}/a.tar"

    def innermost() -> Any:
        with DataLoader(ShardedDataset(url), 1, num_workers=0) as loader, pytest.raises(SampleError) as error:
            list(loader)
        causes = [error.value, error.value.__cause__, error.value.__context__]
        frames = [frame for cause in causes if cause for frame, _ in traceback.walk_tb(cause.__traceback__)]
        held = [value for frame in frames for value in frame.f_locals.values()]
        return [value for value in held if isinstance(value, np.ndarray) and bytes(value) == damaged]

    shown = innermost()
    gc.collect()
    assert shown
    for array in shown:
        assert is_mapped(array)
        assert bytes(array) == damaged


@pytest.mark.one_in(2)
@pytest.mark.here
@pytest.mark.parametrize("name", MAKERS)
def test_every_slot_comes_back(tmp_path: Path, name: str) -> None:
    made = MAKERS[name](tmp_path)
    loader = DataLoader(made.open(), 4, Shuffle("window", 2), workers="thread")
    held = list(loader)
    session = session_of(loader)
    loader.close()
    assert session.resources.arena.num_leased <= len(held) * len(held[0])
    assert session.resources.arena.num_leased > 0 or not any(
        isinstance(v, torch.Tensor) for v in held[0].values()
    )
    del held
    if session.resources.arena.num_leased or session.resources.arena.mapped_bytes:
        gc.collect()
    assert session.resources.arena.num_leased == 0
    assert session.resources.arena.mapped_bytes == 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", MAKERS)
def test_close_frees_what_was_prefetched_without_the_garbage_collector(tmp_path: Path, name: str) -> None:
    """A training loop that allocates little may not see a collection for a long time."""
    made = MAKERS[name](tmp_path)
    gc.disable()
    try:
        for taken in (1, 2, 5):
            loader = DataLoader(made.open(), 4, Shuffle("window", 2))
            loop = iter(loader)
            for _ in range(taken):
                next(loop)
            arena = session_of(loader).resources.arena
            loader.close()
            # Of the chunk whose batches are handed out: slots, and the rows of its window.
            assert arena.num_leased <= len(made.samples[0]) + 2
            del loop
            assert arena.num_leased == 0
            assert arena.mapped_bytes == 0
    finally:
        gc.enable()


def test_close_frees_what_windows_hold_for_batches_that_were_never_built(tmp_path: Path) -> None:
    made, gate, begun = make_tar(tmp_path), threading.Event(), threading.Event()

    def transform(sample: dict[str, Any]) -> Any:
        begun.set()
        assert gate.wait(10)
        return sample

    dataset = made.open(columns=["bin"], transform=transform)
    loader = DataLoader(dataset, 1, Shuffle("window", 3), num_workers=1, workers="thread", collate_fn=len)
    session = stream_of(loader).new_session(0, 0, 1 << 30)
    assert begun.wait(10)
    assert session.resources.engine.stats().open_windows
    assert session.resources.arena.num_leased > 0
    reader = session.resources.sources.opened[0].reader  # closed when nothing more is begun
    close_reader = reader.close
    reader.close = lambda: (gate.set(), close_reader())[1]  # type: ignore[method-assign]
    gc.disable()
    try:
        session.close()
        assert session.resources.arena.num_leased == 0
    finally:
        gc.enable()


def test_the_ledger_knows_what_is_lent_and_forgets_what_came_back(tmp_path: Path) -> None:
    made = make_tokens_bin(tmp_path)
    with DataLoader(made.open(), 4, Shuffle("window", 2)) as loader:
        held = list(loader)
        assert loader.stats().memory.in_use_bytes > 0
        del held
        assert loader.stats().memory.in_use_bytes == 0
    assert loader.stats().memory.window_bytes >= 0


def test_batches_may_be_written_to_without_touching_others(tmp_path: Path) -> None:
    made = make_tokens_bin(tmp_path)
    with DataLoader(made.open(), 4, shuffle=False) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                assert batch["tokens"].tolist() == [s["tokens"] for s in made.samples[4 * number :][:4]]
                batch["tokens"].zero_()


# ---- threads --------------------------------------------------------------------------------------------


def test_threads_live_from_the_first_batch_to_close(ints: Made) -> None:
    loader = DataLoader(ints.open(), 4, shuffle=True)
    assert our_threads() == []
    list(loader)
    assert len(our_threads()) > 1
    loader.close()
    assert our_threads() == []


def test_no_thread_is_left_after_with_break_exception_or_generator_close(ints: Made) -> None:
    with DataLoader(ints.open(), 4, shuffle=True) as loader:
        list(loader)
    assert our_threads() == []
    loader = DataLoader(ints.open(), 4, shuffle=True)
    for _ in loader:
        break
    assert threads_left() == []
    with pytest.raises(KeyError):
        fail_inside(loader)
    gc.collect()
    loop = iter(loader)
    next(loop)
    loop.close()  # type: ignore[attr-defined]
    assert threads_left() == []


def fail_inside(loader: DataLoader) -> None:
    for batch in loader:
        batch["no such column"]


def test_a_loader_that_is_dropped_stops_its_threads(ints: Made) -> None:
    loader = DataLoader(ints.open(), 4, shuffle=True)
    loop = iter(loader)
    next(loop)
    del loop, loader
    gc.collect()
    assert threads_left() == []
    loader = DataLoader(ints.open(), 4, shuffle=True)
    list(loader)  # between two epochs, no loop holds it
    watch = weakref.ref(loader)
    del loader
    assert watch() is None, "a cycle would keep threads until the next garbage collection"
    assert threads_left() == []


def test_a_loader_in_a_cycle_stops_with_the_garbage_collection(ints: Made) -> None:
    loader: Any = DataLoader(ints.open(), 4, shuffle=True)
    loader.me = loader
    list(loader)
    del loader
    gc.collect()
    assert threads_left() == []


def test_torchs_thread_count_is_left_alone(ints: Made) -> None:
    before = torch.get_num_threads()
    with DataLoader(ints.open(), 4, shuffle=True) as loader:
        list(loader)
        assert torch.get_num_threads() == before
        counts: list[int] = []
        other = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        other.start()
        other.join()
    assert counts == [before]


# ---- growth ---------------------------------------------------------------------------------------------


@pytest.mark.one_in(2)
@pytest.mark.parametrize("maker", [make_tar, make_parquet], ids=["tar", "parquet"])
def test_twenty_epochs_hold_no_more_descriptors_or_memory_than_two(tmp_path: Path, maker: Any) -> None:
    made = maker(tmp_path)
    with DataLoader(made.open(), 4, Shuffle("window", 2), workers="thread") as loader:
        for _ in range(2):
            list(loader)
        before, threads = descriptors(), our_threads()
        mapped = session_of(loader).resources.arena.mapped_bytes
        for _ in range(20):
            for _ in loader:
                pass
            assert session_of(loader).resources.arena.mapped_bytes <= 4 * mapped + (1 << 20)
        assert our_threads() == threads
        after = descriptors()
        assert len(after) <= len(before) + len(threads), (before, after)  # files that are being read now


def test_many_loaders_leave_nothing_behind(ints: Made) -> None:
    dataset = ints.open()
    with DataLoader(dataset, 4, shuffle=True) as loader:
        list(loader)
    gc.collect()
    before = descriptors()
    mapped = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(20):
        with DataLoader(dataset, 4, shuffle=True) as loader:
            assert list(islice(loader, 2))
    assert threads_left() == []  # the one that ended what an abandoned loop had
    gc.collect()
    after = descriptors()
    new = {at: leads for at, leads in after.items() if before.get(at) != leads}
    assert len(after) <= len(before), new  # what other tests left may go meanwhile
    assert len(Path("/proc/self/maps").read_text().splitlines()) < mapped + 40


def test_random_access_leaves_no_descriptor_open(ints: Made) -> None:
    dataset = ints.open()
    assert dataset[0]
    before = descriptors()
    assert [dataset[i]["cls"] for i in range(NUM_SAMPLES)] == list(range(NUM_SAMPLES))
    assert descriptors() == before


# ---- processes ------------------------------------------------------------------------------------------

NEVER_CLOSED = """
import sys, warnings
warnings.simplefilter("error")
from dataflow import DataLoader, ShardedDataset
loader = DataLoader(ShardedDataset(sys.argv[1], catalog=sys.argv[2], transform=lambda s: s), 2, shuffle=True)
loop = iter(loader)
print(len(next(loop)["cls"]))
"""

FAILS = NEVER_CLOSED + "raise SystemExit(7)\n"

IN_A_THREAD = NEVER_CLOSED.replace(
    "loop = iter(loader)", "loop = iter(loader); keep = [loader, loop]; keep.append(keep)"
)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        (NEVER_CLOSED, 0),
        pytest.param(FAILS, 7, marks=pytest.mark.full),
        pytest.param(IN_A_THREAD, 0, marks=pytest.mark.full),
    ],
)
def test_the_interpreter_ends_cleanly_with_an_open_loader(
    ints: Made, tmp_path: Path, script: str, code: int
) -> None:
    ints.open()
    command = (script, ints.kwargs["source"], ints.kwargs["catalog"])
    assert run_script(*command, how="forked", folder=tmp_path) == (code, "2\n", "")


def test_a_fork_after_the_start_is_a_clear_error_in_the_child(ints: Made) -> None:
    with DataLoader(ints.open(), 4, shuffle=True) as loader:
        loop = iter(loader)
        next(loop)
        assert exit_code_in_child(lambda: fails_and_closes(loop, loader)) == 0
        assert len([rows_of(batch) for batch in loop]) == len(loader) - 1


def fails_and_closes(loop: Iterator[Any], loader: DataLoader) -> None:
    with pytest.raises(RuntimeError, match="make the loader in the child"):
        for _ in loop:  # what is prefetched may still come
            pass
    loader.close()


def test_a_new_loader_works_in_a_forked_child(ints: Made, pytestconfig: pytest.Config) -> None:
    if pytestconfig.getoption("--builders") == "ray":
        pytest.skip("Ray's connection is not for forked children, and refused there")
    dataset = ints.open()

    def work() -> None:
        with DataLoader(dataset, 4, shuffle=True) as own:
            assert sum(len(batch["cls"]) for batch in own) == NUM_SAMPLES

    with DataLoader(dataset, 4, shuffle=True) as loader:
        next(iter(loader))
        assert exit_code_in_child(work) == 0


# ---- remote stores --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, str]]:
    """A folder and the URL that an HTTP server with byte ranges serves it under."""
    pytest.importorskip("aiohttp")
    folder = tmp_path_factory.mktemp("served")
    with slowstore(folder) as url:
        yield folder, url


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["tar", "tar.gz", "parquet", "tokens.bin", "jsonl", "megatron"])
def test_http_gives_the_same_epochs_and_samples(server: tuple[Path, str], name: str) -> None:
    root, url = server
    folder = root / name.replace(".", "-")
    folder.mkdir()
    made = MAKERS[name](folder)
    source = [f"{url}/{folder.name}/{path.name}" for path in made.shards if path.suffix != ".idx"]
    dataset = made.open(source=source, catalog=str(folder / "remote.catalog"))
    with DataLoader(dataset, 5, Shuffle("window", 3)) as loader:
        for epoch in range(2):
            got = delivered(loader)
            assert got == by_plan(loader, made.samples, epoch)
            assert Counter(map(sort_key, chain(*got))) == Counter(map(sort_key, made.samples))
    assert rows_of({k: [v] for k, v in dataset[7].items()}) == [made.samples[7]]


def test_a_remote_shard_that_changes_is_refused(server: tuple[Path, str]) -> None:
    root, url = server
    folder = root / "changing"
    folder.mkdir()
    made = make_ints_tar(folder)
    source = [f"{url}/changing/{path.name}" for path in made.shards]
    dataset = made.open(source=source, catalog=str(folder / "remote.catalog"))
    write_tar(made.shards[1], [("1.cls", b"1")])
    with (
        DataLoader(dataset, 5, shuffle=True) as loader,
        pytest.raises(Exception, match=r"shard-1\.tar.*size"),
    ):
        list(loader)


def test_many_remote_loaders_leave_no_connection_open(server: tuple[Path, str]) -> None:
    root, url = server
    folder = root / "many"
    folder.mkdir()
    made = make_ints_tar(folder)
    source = [f"{url}/many/{path.name}" for path in made.shards]
    dataset = made.open(source=source, catalog=str(folder / "remote.catalog"))

    def run(times: int) -> int:
        for _ in range(times):
            with DataLoader(dataset, 5, shuffle=True) as loader:
                assert list(islice(loader, 2))
        gc.collect()
        return len(descriptors())

    before = run(3)
    assert run(10) <= before + 20


@pytest.fixture
def memory() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    yield fs
    fs.store.clear()


def in_memory(made: Made, fs: Any, catalog: Path, **options: Any) -> ShardedDataset:
    for path in made.folder.rglob("*"):
        if path.is_file():
            fs.pipe_file(f"/data/{path.relative_to(made.folder)}", path.read_bytes())
    source = "memory://data" + str(made.kwargs["source"]).removeprefix(str(made.folder))
    return made.open(source=source, catalog=str(catalog), **options)


@pytest.mark.reads_here
def test_local_files_alone_are_not_read_ahead_of_the_first_batch(tmp_path: Path, memory: Any) -> None:
    """To read them takes cores, which that batch needs; from afar it takes time."""
    made = MAKERS["tar"](tmp_path)
    for dataset, is_alone in (made.open(), True), (in_memory(made, memory, tmp_path / "c.arrow"), False):
        with DataLoader(dataset, 4) as loader:
            next(iter(loader))
            assert session_of(loader).resources.engine._options.first_batch_alone == is_alone


@pytest.mark.reads_here
@pytest.mark.parametrize(
    ("name", "shuffle"), in_pairs(MAKERS, [Shuffle("window", 2), Shuffle("full")]), ids=str
)
@pytest.mark.one_in(3)
def test_any_fsspec_store_gives_the_same_epoch(
    tmp_path: Path, memory: Any, name: str, shuffle: Shuffle
) -> None:
    made = MAKERS[name](tmp_path)
    with DataLoader(in_memory(made, memory, tmp_path / "remote.catalog"), 5, shuffle) as loader:
        assert delivered(loader) == by_plan(loader, made.samples, 0)


@pytest.mark.reads_here
def test_a_chain_of_filesystems_is_followed(tmp_path: Path, memory: Any) -> None:
    made = make_ints_tar(tmp_path)
    for path in made.shards:
        memory.pipe_file(f"/data/{path.name}", path.read_bytes())
    source = [f"simplecache::memory://data/{path.name}" for path in made.shards]
    options = {"simplecache": {"cache_storage": str(tmp_path / "cache")}}
    dataset = made.open(source=source, catalog=str(tmp_path / "c"), storage_options=options)
    with DataLoader(dataset, 5, shuffle=True) as loader:
        assert delivered(loader) == by_plan(loader, made.samples, 0)
