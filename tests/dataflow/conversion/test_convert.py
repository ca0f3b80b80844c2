"""`convert`: the same bytes whoever writes them, values that keep their types, words where it stops."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import re
import signal
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from conversion_kit import (
    NUM_SAMPLES,
    DiesOnce,
    KilledAt,
    Numbers,
    digest,
    grouped,
    is_even,
    is_late,
    make_source,
    picture,
    renamed,
    that_fails,
    with_other_columns,
)
from servers_kit import SERVERS

from dataflow import (
    ConversionError,
    Converted,
    DataflowError,
    SampleError,
    ShardedDataset,
    ShardWriteError,
    ShardWriter,
    convert,
)
from dataflow.conversion.folder import OutputFolder, _this_process, write_errors
from dataflow.conversion.plan import bounds_by_bytes
from dataflow.tools.cli import main
from sharding.write.file import NewFile


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_source(tmp_path_factory.mktemp("convert"))


def raw(folder: Path | str) -> ShardedDataset:
    return ShardedDataset(f"{folder}/dataset.catalog", decode=None)


# ---- values ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:dicts in .* become JSON text")
@pytest.mark.parametrize(
    ("to", "function"),
    [
        ("tar", None),
        ("parquet", renamed),
        ("mds", renamed),
        pytest.param("tar", renamed, marks=pytest.mark.full),
        pytest.param("parquet", None, marks=pytest.mark.full),
        pytest.param("mds", None, marks=pytest.mark.full),
    ],
)
def test_values_arrive_in_every_target(source: str, tmp_path: Path, to: str, function: Any) -> None:
    made = convert(source, tmp_path / "out", to=to, map=function, shard_samples=7, workers=1, verify=True)
    assert (made.samples, made.verified) == (NUM_SAMPLES, NUM_SAMPLES)
    written = ShardedDataset(made.catalog)
    names = ("jpg", "txt", "cls", "npy") if function is None else ("image", "text", "label", "vector")
    endings = {"image": ".jpg", "text": "", "label": ".cls", "vector": ".npy"} if to == "tar" else {}
    names = tuple(name + endings.get(name, "") for name in names)
    sample = written.select(names)[33]
    assert [sample[names[1]], int(sample[names[2]])] == ["bild 33 ü", 33]
    assert sample[names[3]].tolist() == [0.0]
    stored = raw(tmp_path / "out")[33][names[0]]
    assert bytes(stored) == picture(33)
    assert (made.catalog, written.catalog.checksums is not None) == (f"{tmp_path}/out/dataset.catalog", True)


class Lengths:
    """Makes the length of a text, of many samples at once."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        raise AssertionError("it has a batch form")

    def batch(self, samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"n": len(sample["txt"])} for sample in samples]


class Negated(Lengths):
    """Has another call than the class whose batch form it inherits."""

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"n": -len(sample["txt"])}


@pytest.mark.parametrize(("function", "sign"), [(Lengths(), 1), (Negated(), -1)])
def test_a_map_has_the_batch_form_of_the_class_whose_call_it_has(
    source: str, tmp_path: Path, function: Any, sign: int
) -> None:
    made = convert(source, tmp_path / "out", to="parquet", map=function, workers=1)
    assert ShardedDataset(made.catalog)[33]["n"] == sign * len("bild 33 ü")


def way_of(folder: Path) -> str:
    return str(json.loads((folder / ".convert/plan.json").read_text())["options"]["way"])


def test_a_batched_map_gets_columns_and_makes_as_many_samples_as_it_likes(
    source: str, tmp_path: Path
) -> None:
    for out, workers in (("a", 1), ("b", 2)):
        options: dict[str, Any] = {"shard_samples": 20, "workers": workers, "verify": True}
        made = convert(source, tmp_path / out, to="tar", map=grouped, batched=7, filter=is_even, **options)
        assert (made.samples, made.verified) == (8, 8)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
    firsts = [int(bytes(raw(tmp_path / "b")[i]["first.cls"].tolist())) for i in range(8)]
    assert firsts == [0, 6, 8, 14, 20, 26, 28, 34]


def test_a_batched_map_of_columns_of_other_lengths_is_an_error_that_says_which(
    source: str, tmp_path: Path
) -> None:
    with pytest.raises(SampleError, match=r"different lengths .*\{'a': 40, 'b': 1\}"):
        convert(source, tmp_path, to="mds", map=lambda c: {"a": c["cls"], "b": [0]}, batched=True)
    with pytest.raises(ValueError, match="batched must be True"):
        convert(source, tmp_path, to="mds", batched=True)


def test_tars_are_copied_member_by_member_of_whole_blocks(source: str, tmp_path: Path) -> None:
    convert(source, tmp_path / "out", to="tar", workers=1, verify=True)
    assert way_of(tmp_path / "out") == "members"
    assert [bytes(raw(tmp_path / "out")[i]["txt"]).decode() for i in (0, 39)] == ["bild 0 ü", "bild 39 ü"]


def test_shards_of_so_many_samples_or_bytes_cut_blocks_and_keep_members(source: str, tmp_path: Path) -> None:
    made = convert(source, tmp_path / "a", to="tar", shard_samples=7, workers=1, verify=True)
    assert [len(ShardedDataset(url)) for url in made.files] == [7] * 5 + [5]
    assert way_of(tmp_path / "a") == "samples"
    small = convert(source, tmp_path / "b", to="tar", shard_size=20_000, workers=1, verify=True)
    assert small.shards > 3
    mixed = convert(source, tmp_path / "c", to="tar", shuffle=3, workers=1, verify=True)
    order = [int(bytes(raw(tmp_path / "c")[i]["cls"].tolist())) for i in range(40)]
    assert sorted(order) == list(range(40)) != order
    assert mixed.verified == 40


def test_parquet_keeps_its_types_and_what_is_missing(tmp_path: Path) -> None:
    table = pa.table(
        {
            "a": pa.array([1, None, 3], pa.int16()),
            "s": pa.array([{"x": 1.5}, None, {"x": float("nan")}]),
            "d": pa.array(["u", "v", "u"]).dictionary_encode(),
        }
    )
    pq.write_table(table, tmp_path / "0.parquet")
    pq.write_table(table.set_column(0, "a", pa.array([7, 8, 9], pa.int32())), tmp_path / "1.parquet")
    made = convert(f"{tmp_path}/?.parquet", tmp_path / "out", to="parquet", workers=1, verify=True)
    found = pq.read_table(made.files[0])
    assert found.schema.field("a").type == pa.int32()
    assert found.column("a").to_pylist() == [1, None, 3, 7, 8, 9]
    assert found.column("s").to_pylist()[0] == {"x": 1.5}


def test_a_shuffle_is_one_permutation_of_all_samples(source: str, tmp_path: Path) -> None:
    orders = []
    for seed, folder in ((1, "a"), (1, "b"), (2, "c")):
        convert(source, tmp_path / folder, to="mds", shuffle=seed, shard_samples=9, workers=1, verify=5)
        orders.append([int(sample["cls"]) for sample in map(raw(tmp_path / folder).__getitem__, range(40))])
    assert orders[0] == orders[1] != orders[2]
    assert [sorted(order) for order in orders] == [list(range(NUM_SAMPLES))] * 3


def test_a_shuffle_mixes_samples_of_so_many_blocks_so_that_a_shard_reads_no_others(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.conversion.work.WINDOW_BLOCKS", 2)
    made = convert(source, tmp_path / "a", to="mds", shuffle=1, shard_samples=8, workers=1, verify=True)
    labels = [[int(ShardedDataset(url)[i]["cls"]) for i in range(8)] for url in made.files]
    assert sorted(label for shard in labels for label in shard) == list(range(NUM_SAMPLES))
    assert [len({label // 8 for label in shard}) for shard in labels] == [1, 2, 2, 2, 2]


def test_an_index_that_is_large_is_sent_once_and_not_in_each_task(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(source, tmp_path / "a", to="mds", shard_samples=9, workers=1)
    monkeypatch.setattr("dataflow.conversion.dispatch._MOST_BYTES_SENT", 0)
    seen = set[str]()

    class Seeing(ThreadPoolExecutor):
        def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Any:
            seen.update(path.name for path in (tmp_path / "b/.convert").glob("*.index"))
            assert len(pickle.dumps(function)) < 4000
            return super().submit(function, *args, **kwargs)

    with Seeing(2) as pool:
        convert(source, tmp_path / "b", to="mds", shard_samples=9, executor=pool)
    assert digest(tmp_path / "b") == digest(tmp_path / "a")
    assert (len(seen), list((tmp_path / "b/.convert").glob("*.index"))) == (1, [])


@pytest.mark.filterwarnings("ignore:dicts in .* become JSON text")
def test_a_filter_makes_shards_smaller_and_leaves_out_empty_ones(source: str, tmp_path: Path) -> None:
    made = convert(source, tmp_path / "a", to="mds", filter=is_even, shard_samples=10, workers=1, verify=7)
    assert (made.shards, made.samples) == (4, 20)
    late = convert(source, tmp_path / "b", to="parquet", filter=is_late, shard_samples=10, workers=1)
    assert [Path(url).name for url in late.files] == ["shard-000002.parquet", "shard-000003.parquet"]
    again = convert(source, tmp_path / "b", to="parquet", filter=is_late, shard_samples=10, workers=1)
    assert (again.skipped, again.files) == (4, late.files)
    kept = convert(
        f"{tmp_path}/b/*.parquet", tmp_path / "c", to="tar", filter=pc.field("cls") > 30, workers=1
    )
    assert kept.samples == 9


def test_datasets_and_iterables_of_all_kinds_are_sources(source: str, tmp_path: Path) -> None:
    delivered = ShardedDataset(source, transform=lambda sample: {"n": sample["cls"], "v": sample["npy"]})
    convert(delivered, tmp_path / "a", to="parquet", workers=1, verify=True)
    assert pq.read_schema(tmp_path / "a/shard-000000.parquet").field("v").type == pa.list_(pa.float32())
    convert([{"n": i} for i in range(5)], tmp_path / "b", to="tar", workers=1, verify=True)
    assert ShardedDataset(f"{tmp_path}/b")[4] == {"n.cls": 4}
    made = convert(Numbers(25), tmp_path / "c", to="mds", shard_samples=10, verify=True)
    assert (made.shards, made.samples, made.verified) == (3, 25, 25)
    with pytest.raises(ValueError, match="reads the source twice"):
        convert(iter(Numbers(3)), tmp_path / "d", to="mds", verify=True)
    with pytest.raises(SampleError, match="a sample is a dict"):
        convert([1, 2, 3], tmp_path / "e", to="mds")


# ---- the same bytes -------------------------------------------------------------------------------------


def test_any_executor_writes_the_same_bytes(source: str, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", to="parquet", map=renamed, shard_samples=3, workers=1)
    with ThreadPoolExecutor(3) as pool:
        convert(source, tmp_path / "b", to="parquet", map=renamed, shard_samples=3, executor=pool)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != {}


@pytest.mark.full
@pytest.mark.timeout(120)
def test_one_two_and_forty_workers_write_the_same_bytes(source: str, tmp_path: Path) -> None:
    digests = []
    for workers in (1, 2, 40):
        folder = tmp_path / str(workers)
        convert(source, folder, to="parquet", map=renamed, shard_samples=1, workers=workers)
        digests.append(digest(folder))
    assert digests[0] == digests[1] == digests[2]


@pytest.mark.timeout(60)
def test_killed_conversions_go_on_to_the_same_bytes(source: str, tmp_path: Path) -> None:

    def written(folder: str, **more: Any) -> Converted:
        function = KilledAt(str(tmp_path))
        return convert(source, tmp_path / folder, to="mds", map=function, shard_samples=4, workers=1, **more)

    whole = written("a")
    for call in (70, 3, 12):
        (tmp_path / "ends").write_text(str(call))
        child = os.fork()
        if child == 0:
            written("b")
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (tmp_path / "ends").unlink()
    rest = written("b", verify=True)
    assert 0 < rest.skipped < whole.shards
    assert digest(tmp_path / "a") == digest(tmp_path / "b")


@pytest.mark.full
@pytest.mark.timeout(120)
def test_shards_of_a_worker_that_dies_are_written_by_others(source: str, tmp_path: Path) -> None:
    dies = DiesOnce(str(tmp_path / "died"))
    made = convert(source, tmp_path / "a", to="mds", map=dies, shard_samples=4, workers=2)
    assert (made.samples, (tmp_path / "died").exists()) == (NUM_SAMPLES, True)


@pytest.mark.full
@pytest.mark.timeout(120)
def test_an_executor_that_breaks_is_an_error_that_says_what_is_finished(source: str, tmp_path: Path) -> None:
    dies = DiesOnce(str(tmp_path / "died"))
    with (
        ProcessPoolExecutor(1, mp_context=get_context("forkserver")) as pool,
        pytest.raises(DataflowError, match="of 10 shards are finished: start it again"),
    ):
        convert(source, tmp_path / "a", to="mds", map=dies, shard_samples=4, executor=pool)
    rest = convert(source, tmp_path / "a", to="mds", map=dies, shard_samples=4, workers=1)
    assert rest.samples == NUM_SAMPLES


def test_a_restart_skips_what_is_finished_and_writes_what_was_lost(source: str, tmp_path: Path) -> None:
    first = convert(source, tmp_path / "a", to="tar", map=renamed, shard_samples=10, workers=1)
    before = digest(tmp_path / "a")
    Path(first.files[2]).unlink()
    Path(first.files[3]).write_bytes(b"cut")
    (tmp_path / "a/shard-000002.tar.0123456789ab.partial").write_bytes(b"of a killed worker")
    again = convert(source, tmp_path / "a", to="tar", map=renamed, shard_samples=10, workers=1)
    assert (again.skipped, again.shards, digest(tmp_path / "a")) == (2, 4, before)


def test_an_iterable_is_read_again_and_what_was_written_skipped(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the line went dead"):
        convert(Numbers(30, fails_at=25), tmp_path / "a", to="mds", shard_samples=10)
    numbers = Numbers(30)
    made = convert(numbers, tmp_path / "a", to="mds", shard_samples=10)
    assert (made.skipped, made.shards, numbers.taken) == (2, 3, 30)
    with pytest.raises(ConversionError, match="the same items each time"):
        convert(Numbers(15), tmp_path / "a", to="mds", shard_samples=10)


@pytest.mark.full
def test_the_reader_of_streaming_reads_what_is_written_for_it(source: str, tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    convert(source, tmp_path / "a", to="mds", map=renamed, shard_samples=15, workers=1)
    read = streaming.StreamingDataset(local=str(tmp_path / "a"), shuffle=False, batch_size=1)
    assert [read[i]["text"] for i in range(len(read))] == [f"bild {i} ü" for i in range(NUM_SAMPLES)]
    assert (read[7]["small"].dtype, read[7]["image"].size) == (np.int16, (8, 8))
    assert read[7]["vector"].tolist() == [0.0, 1.0]


@pytest.mark.full
def test_samples_of_mds_are_byte_for_byte_those_of_its_own_writer(tmp_path: Path) -> None:
    streaming = pytest.importorskip("streaming", reason="mosaicml-streaming is not installed")
    rows = [{"b": bytes(i), "t": f"ü{i}", "n": i, "a": np.ones((1 + i % 2, 3), np.float32)} for i in range(9)]
    columns = {"b": "bytes", "t": "str", "n": "int", "a": "ndarray:float32"}
    with streaming.MDSWriter(out=str(tmp_path / "own"), columns=columns, size_limit=None) as writer:
        for row in rows:
            writer.write(row)
    made = convert(rows, tmp_path / "ours", to="mds", workers=1)
    assert Path(made.files[0]).read_bytes() == (tmp_path / "own/shard.00000.mds").read_bytes()


# ---- what stands in the way -----------------------------------------------------------------------------


def test_another_conversion_into_the_folder_is_refused_by_what_differs(source: str, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", to="mds", shard_samples=10, workers=1)
    with pytest.raises(ConversionError, match="map= was '', and is 'conversion_kit:renamed"):
        convert(source, tmp_path / "a", to="mds", map=renamed, shard_samples=10, workers=1)
    with pytest.raises(ConversionError, match="to was 'mds', and is 'tar'"):
        convert(source, tmp_path / "a", to="tar", shard_samples=10, workers=1)
    made = convert(source, tmp_path / "a", to="tar", shard_samples=40, workers=1, overwrite=True)
    assert made.shards == 1
    assert not list((tmp_path / "a").glob("*.mds"))
    (tmp_path / "b").mkdir()
    (tmp_path / "b/other.tar").write_bytes(b"")
    with pytest.raises(ConversionError, match="files that no conversion wrote"):
        convert(source, tmp_path / "b", to="tar", workers=1)


def test_two_conversions_into_one_folder_at_a_time_are_refused(source: str, tmp_path: Path) -> None:
    (tmp_path / "a/.convert").mkdir(parents=True)
    with (tmp_path / "a/.convert/owner.json").open("w") as other:
        other.write('{"pid": 4711, "host": "elsewhere"}')
        other.flush()
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(ConversionError, match="process 4711 on elsewhere: wait for it"):
            convert(source, tmp_path / "a", to="mds", workers=1)
    assert convert(source, tmp_path / "a", to="mds", workers=1).samples == NUM_SAMPLES


def test_the_file_that_says_who_converts_has_the_mode_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    with OutputFolder(str(tmp_path)).held():
        assert (tmp_path / ".convert/owner.json").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_what_lies_in_memory_is_converted_by_this_process_alone(source: str, tmp_path: Path) -> None:
    folder = f"memory:/{tmp_path}"
    for path in Path(source).parent.iterdir():
        fsspec.filesystem("memory").pipe_file(f"{tmp_path}/{path.name}", path.read_bytes())
    made = convert(f"{folder}/*.tar", f"{folder}/out", to="mds", shard_samples=9, workers=2, verify=True)
    assert (made.shards, made.verified) == (5, NUM_SAMPLES)


def test_a_place_that_cannot_be_written_to_is_said_to_be_such(source: str) -> None:
    with pytest.raises(ConversionError, match="no such file"):
        convert(source, "/proc/x", to="tar", workers=1)
    with (
        pytest.raises(ConversionError, match="http://h/x: files of this protocol"),
        write_errors("http://h/x"),
    ):
        raise NotImplementedError


@pytest.mark.full
@pytest.mark.timeout(240)
@pytest.mark.filterwarnings("ignore")  # aiobotocore leaves sessions to be closed by garbage collection
def test_a_conversion_to_s3_that_is_killed_goes_on_and_shows_no_half_of_a_shard(
    source: str, tmp_path: Path
) -> None:
    with SERVERS["radosgw"](tmp_path) as store:
        fs, _ = fsspec.core.url_to_fs(store.url, **store.options)
        dest, options = f"{store.url}/out", {"to": "mds", "map": renamed, "shard_samples": 2}
        process = get_context("spawn").Process(
            target=convert,
            args=(source, dest),
            kwargs={**options, "storage_options": store.options, "workers": 2},
        )
        process.start()
        while (
            len(finished := [name for name in fs.find("bucket/out", refresh=True) if name.endswith(".mds")])
            < 3
        ):
            assert process.is_alive()
        process.kill()
        process.join()
        made = convert(source, dest, **options, storage_options=store.options, workers=2, verify=True)
        assert len(finished) <= made.skipped + 2 < made.shards + 2
        assert made.verified == NUM_SAMPLES
        convert(source, tmp_path / "here", **options, workers=1)
        wanted = {path.name: path.read_bytes() for path in (tmp_path / "here").glob("*.mds")}
        found = {name.rpartition("/")[2]: fs.cat_file(name) for name in fs.find("bucket/out", refresh=True)}
        assert {name: found.get(name) for name in wanted} == wanted


def test_in_a_store_the_folder_of_a_dead_owner_is_taken_over(source: str) -> None:
    store, url = fsspec.filesystem("memory"), "memory://convert-owner"
    made = convert(source, url, to="mds", shard_samples=10, workers=1, verify=True)
    assert len(ShardedDataset(made.catalog)) == NUM_SAMPLES
    assert not store.exists("/convert-owner/.convert/owner.json")
    mine = _this_process("other")
    store.pipe_file("/convert-owner/.convert/owner.json", json.dumps(mine).encode())
    with pytest.raises(ConversionError, match=f"process {os.getpid()} on .*remove memory://"):
        convert(source, url, to="mds", shard_samples=10, workers=1)
    dead = json.dumps({**mine, "pid": 2**22 + 1}).encode()
    store.pipe_file("/convert-owner/.convert/owner.json", dead)
    assert convert(source, url, to="mds", shard_samples=10, workers=1).skipped == 4


def test_a_map_that_returns_other_columns_is_an_error_that_names_both(source: str, tmp_path: Path) -> None:
    with pytest.raises(SampleError, match="the columns text, this one text, more") as caught:
        convert(source, tmp_path / "a", to="mds", map=with_other_columns, shard_samples=10, workers=1)
    assert caught.value.key == "k0033" or "k0033" in str(caught.value)


def test_a_bad_sample_is_named_and_loses_nothing_that_was_finished(source: str, tmp_path: Path) -> None:
    with pytest.raises(
        SampleError, match="map= raised KeyError: 'caption'; the sample has cls, jpg"
    ) as caught:
        convert(source, tmp_path / "a", to="parquet", map=that_fails, shard_samples=10, workers=1)
    assert (caught.value.key, Path(caught.value.shard).name) == ("k0033", "004.tar")
    kept = sorted(path.name for path in (tmp_path / "a").glob("*.parquet"))
    assert kept == [f"shard-{i:06d}.parquet" for i in range(3)]


def test_a_full_disk_loses_nothing_that_was_finished(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = NewFile.write

    def full(self: NewFile, data: Any) -> int:
        if "00002" in self.url and self.url.endswith(".mds"):
            raise OSError(28, "No space left on device")
        return write(self, data)

    with monkeypatch.context() as patched:
        patched.setattr(NewFile, "write", full)
        with pytest.raises(ShardWriteError, match="No space left"):
            convert(source, tmp_path / "a", to="mds", shard_samples=10, workers=1)
    rest = convert(source, tmp_path / "a", to="mds", shard_samples=10, workers=1, verify=True)
    assert (rest.skipped, rest.samples) == (2, NUM_SAMPLES)
    assert not list((tmp_path / "a").glob("*.partial"))


def test_a_later_value_of_another_type_names_its_column(tmp_path: Path) -> None:
    samples: list[dict[str, Any]] = [{"x": i} for i in range(100)]
    samples[90]["x"] = "text"
    for to in ("mds", "parquet", "tar"):
        with pytest.raises(SampleError, match="column 'x'"):
            convert(samples, tmp_path / to, to=to, workers=1)


def test_verify_finds_what_is_not_as_the_source_gives_it(source: str, tmp_path: Path) -> None:
    made = convert(source, tmp_path / "a", to="mds", shard_samples=40, workers=1, checksum=False)
    path = Path(made.files[0])
    then = path.stat()
    path.write_bytes(path.read_bytes().replace(b"bild 17", b"Bild 17"))
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    with pytest.raises(ConversionError, match="sample 17, column 'txt': 'Bild 17 ü' is not 'bild 17 ü'"):
        convert(source, tmp_path / "a", to="mds", shard_samples=40, workers=1, checksum=False, verify=True)


@pytest.mark.full  # `test_worker_starts` has one of a loader
def test_a_script_needs_no_guard_and_its_functions_may_be_its_own(source: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from dataflow import convert\n"
        "print('once')\n"
        "step = 3\n"
        "def moved(sample):\n"
        "    return {'label': sample['cls'] + step}\n"
        "made = convert(sys.argv[1], sys.argv[2], to='parquet', map=moved, shard_samples=20, workers=2)\n"
        "print(made.samples, made.shards)\n"
    )
    command = [sys.executable, script, source, tmp_path / "out"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, cwd=tmp_path)
    assert told.stdout == f"once\n{NUM_SAMPLES} 2\n"
    assert pq.read_table(tmp_path / "out/shard-000001.parquet")["label"].to_pylist()[-1] == NUM_SAMPLES + 2


def test_the_command_converts_and_says_what_was_finished_before(source: str, tmp_path: Path) -> None:
    def run(*more: str) -> str:
        arguments = [source, str(tmp_path / "a"), "--to", "mds", "--shard-samples", "10", "--workers", "1"]
        result = CliRunner().invoke(main, ["convert", *arguments, *more])
        return result.output + str(result.exception or "")

    functions = ("--map", "conversion_kit:renamed", "--filter", "conversion_kit:is_even")
    assert "20 samples in 4 shards" in run(*functions, "--verify", "5")
    again = run(*functions, "--verify")
    assert "4 shards were finished before, and were skipped" in again
    assert "20 samples were compared with the source: all are the same" in again
    assert "has another conversion: filter= was" in run("--map", "conversion_kit:renamed")
    assert "conversion_kit:other: the module has no function 'other'" in run("--map", "conversion_kit:other")


def test_a_destination_that_was_forgotten_is_named(source: str, tmp_path: Path) -> None:
    first, *files = sorted(map(str, Path(source).parent.iterdir()))
    for command, words in (
        ([source], rf"destination is missing: dataflow convert {re.escape(source)} DEST --to mds"),
        ([first, *files], rf"the destination, {re.escape(files[-1])}, is a file"),
        ([first, source], rf"the destination, {re.escape(source)}, is a pattern"),
    ):
        result = CliRunner().invoke(main, ["convert", *command, "--to", "mds"])
        assert result.exit_code == 2 or result.exit_code == 1
        assert re.search(words, " ".join(result.output.split()))
    for dest in ("", None, 1):
        with pytest.raises(ValueError, match="dest must be a folder"):
            convert(source, dest, to="mds")  # type: ignore[arg-type]


def holding_itself(columns: list[Any]) -> Any:
    values: list[Any] = columns
    for _ in range(120):
        values = [1, values]
    columns.append(columns)
    return {"x": columns, "deep": values}


@pytest.mark.parametrize("to", ["parquet", "tar", "mds", "tokens"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"x": holding_itself([])["x"]}, "column 'x' holds itself, or is nested over 100 deep"),
        ({"x": {"y": holding_itself([])["deep"]}}, "column 'x' holds itself, or is nested over 100 deep"),
        ({1: "text"}, "a column is called 1, of type int: names are text"),
    ],
)
def test_what_holds_itself_or_has_no_name_is_named_by_its_sample(
    tmp_path: Path, to: str, value: Any, words: str
) -> None:
    more: dict[str, Any] = {"length": 2} if to == "tokens" else {}
    with pytest.raises(SampleError, match=words) as caught:
        convert([{"x": 1}], tmp_path, to=to, map=lambda _: value, workers=1, **more)
    assert caught.value.key == "0"
    fine = [{"x": [1, 2]}] * 80
    with pytest.raises(SampleError, match=words) as caught:
        convert([*fine, value], tmp_path, to="parquet", workers=1)
    assert caught.value.key == "80"


# ---- tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("to", "length"), [("tokens", 4), ("megatron", None), ("megatron", 4)])
def test_token_ids_become_token_shards(tmp_path: Path, to: str, length: int | None) -> None:
    with ShardWriter(f"{tmp_path}/ids/%d.parquet", max_count=5) as shards:
        for i in range(10):
            shards.write({"input_ids": list(range(i, 2 * i + 1))})
    made = convert(
        f"{tmp_path}/ids", tmp_path / "out", to=to, dtype="uint16", end_token=9, length=length, workers=1,
        shard_samples=4, verify=True,
    )  # fmt: skip
    tokens = [token for i in range(10) for token in [*range(i, 2 * i + 1), 9]]
    stored = np.concatenate([np.fromfile(path, np.uint16) for path in made.files])
    assert stored.tolist() == tokens
    windows = sum((Path(path).stat().st_size // 2 - 1) // 4 for path in made.files)
    assert len(ShardedDataset(made.catalog)) == (windows if length else 10)


# ---- the plan -------------------------------------------------------------------------------------------


def test_shards_end_where_blocks_do_and_large_blocks_are_divided() -> None:
    samples, nbytes = np.array([10, 10, 0, 10, 10]), np.array([40, 40, 0, 250, 10])
    bounds = bounds_by_bytes(samples, nbytes, 100)
    assert bounds == [0, 20, 23, 26, 40]
