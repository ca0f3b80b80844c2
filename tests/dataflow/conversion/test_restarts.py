"""What a conversion finds where it writes: its own source, another conversion, its own shards of before."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from conversion_kit import digest, make_source
from fsspec.implementations.local import LocalFileSystem
from parameters_kit import in_full

from dataflow import ConversionError, DataflowError, ShardedDataset, ShardWriter, convert
from dataflow.conversion.folder import OutputFolder
from sharding.write.file import NewFile

OLD = [{"x": i, "k": f"{i}"} for i in range(4)]
NEW = [{"x": -i, "y": "new"} for i in range(6)]


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def written(folder: Path, rows: list[dict[str, Any]], to: str = "mds", **more: Any) -> Any:
    return convert(rows, folder, to=to, shard_samples=2, workers=1, progress=False, **more)


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """What the catalog leads to, whatever the format."""
    rows = ShardedDataset(f"{folder}/dataset.catalog")
    return [{name.partition(".")[0]: value for name, value in rows[i].items()} for i in range(len(rows))]


# ---- its own source -------------------------------------------------------------------------------------


def by_catalog(folder: Path) -> tuple[Any, Any]:
    return f"{folder}/dataset.catalog", folder


def by_another_spelling(folder: Path) -> tuple[Any, Any]:
    return f"{folder}/*.mds", f"file://{folder}/../{folder.name}/"


def by_a_link_to_the_folder(folder: Path) -> tuple[Any, Any]:
    (folder.parent / "link").symlink_to(folder)
    return f"{folder}/*.mds", folder.parent / "link"


def by_links_to_its_files(folder: Path) -> tuple[Any, Any]:
    (folder.parent / "links").mkdir()
    for path in [*folder.glob("*.mds"), folder / "index.json"]:
        (folder.parent / "links" / path.name).symlink_to(path)
    return f"{folder.parent}/links/*.mds", folder


def as_what_is_joined(folder: Path) -> tuple[Any, Any]:
    with ShardWriter(f"{folder.parent}/other/0.parquet") as shards:
        shards.write({"key": "1", "z": 2})
    other = ShardedDataset(f"{folder.parent}/other/0.parquet")
    return other.join(ShardedDataset(f"{folder}/*.mds"), on=("key", "k")), folder


@pytest.mark.parametrize(
    "named",
    [by_catalog, by_another_spelling, by_a_link_to_the_folder, by_links_to_its_files, as_what_is_joined],
)
@pytest.mark.parametrize("overwrite", [True, False])
def test_a_conversion_into_its_own_source_is_refused_before_anything_is_touched(
    tmp_path: Path, named: Callable[[Path], tuple[Any, Any]], overwrite: bool
) -> None:
    written(tmp_path / "data", OLD)
    source, dest = named(tmp_path / "data")
    before = tree(tmp_path / "data")
    with pytest.raises(ConversionError, match=r"mds lies in the destination.* never replaces its own source"):
        convert(source, dest, to="tar", workers=1, overwrite=overwrite)
    assert tree(tmp_path / "data") == before


def test_a_source_of_a_store_is_known_by_its_other_names(tmp_path: Path) -> None:
    store = fsspec.filesystem("memory")
    for path in Path(make_source(tmp_path)).parent.iterdir():
        store.pipe_file(f"{tmp_path}/{path.name}", path.read_bytes())
    with pytest.raises(ConversionError, match="lies in the destination"):
        convert(f"memory:/{tmp_path}/*.tar", f"memory://{tmp_path}/", to="mds", workers=1, overwrite=True)
    assert len(store.ls(f"{tmp_path}")) == 5


# ---- another conversion's shards ------------------------------------------------------------------------


def killed_before_step(number: int, work: Callable[[], Any]) -> bool:
    """Run in a process that is killed before it shows or removes its so-manieth file; whether it was."""
    child = os.fork()
    if child == 0:
        steps = [number]

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def stepping(*args: Any) -> Any:
                steps[0] -= 1
                if steps[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return function(*args)

            return stepping

        NewFile.commit = counted(NewFile.commit)  # type: ignore[method-assign]
        LocalFileSystem.rm_file = counted(LocalFileSystem.rm_file)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


@pytest.mark.parametrize("to", ["mds", *in_full("tar")])
def test_a_kill_at_any_step_of_overwriting_leaves_the_old_set_or_the_new_one_whole(
    tmp_path: Path, to: str
) -> None:
    written(tmp_path / "old", OLD)
    written(tmp_path / "new", NEW, to)
    step, sets = 0, set[str]()
    while True:
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "old", folder, copy_function=shutil.copy2)
        written(folder, OLD)  # the catalog names this folder's files from now on
        if not killed_before_step(step, lambda at=folder: written(at, NEW, to, overwrite=True)):
            break
        found = rows_of(folder)
        assert found in (OLD, NEW)
        sets.add("old" if found == OLD else "new")
        if (folder / "index.json").exists():
            for shard in json.loads((folder / "index.json").read_text())["shards"]:
                raw = shard["raw_data"]
                assert (folder / raw["basename"]).stat().st_size == raw["bytes"]
        is_begun = json.loads((folder / ".convert/plan.json").read_text())["run"] == 1
        has_receipts = any((folder / ".convert/shards-r1").glob("0*.json"))
        written(folder, NEW, to, overwrite=not (is_begun and has_receipts) or step % 2 == 0)
        assert rows_of(folder) == NEW
        assert len([name for name in digest(folder) if name.startswith("shard")]) == 3
        assert len(list((folder / ".convert").glob("shards*"))) == 1
        step += 1
    assert step > 12
    assert sets == {"old", "new"}


def test_what_no_conversion_wrote_is_left_where_it_is(tmp_path: Path) -> None:
    with ShardWriter(f"{tmp_path}/out/shard-%06d.tar", max_count=2) as shards:
        for i in range(4):
            shards.write({"__key__": f"{i}", "cls": i})
    before = tree(tmp_path / "out")
    written(tmp_path / "out", NEW, "tar", overwrite=True)
    assert rows_of(tmp_path / "out") == NEW
    assert before.items() <= tree(tmp_path / "out").items()
    (tmp_path / "mds").mkdir()
    (tmp_path / "mds/index.json").write_text("{}")
    with pytest.raises(ConversionError, match=r"index\.json names shards that no conversion wrote"):
        written(tmp_path / "mds", NEW, overwrite=True)


def test_what_was_begun_twice_and_never_finished_is_kept_once(tmp_path: Path) -> None:
    folder, unfit = tmp_path / "out", [{"x": 1}] * 70 + [{"x": "text"}]
    for _ in range(3):
        with pytest.raises(DataflowError, match="column 'x'"):
            convert(unfit, folder, to="mds", shard_samples=70, workers=1, overwrite=True)
    assert sorted(path.name for path in folder.glob("*.mds")) == ["shard.00000-r2.mds", "shard.00000.mds"]
    written(folder, NEW, overwrite=True)
    assert sorted(path.name for path in folder.glob("*.mds")) == [f"shard.0000{i}-r3.mds" for i in range(3)]


def test_a_folder_of_two_conversions_is_no_dataset(tmp_path: Path) -> None:
    written(tmp_path, OLD, "tar")
    assert killed_before_step(4, lambda: written(tmp_path, NEW, "tar", overwrite=True))
    with pytest.raises(DataflowError, match=r"two conversions, such as .*-r1\.tar.* open dataset\.catalog"):
        ShardedDataset(str(tmp_path))
    assert rows_of(tmp_path) == OLD
    written(tmp_path, NEW, "tar")
    assert len(ShardedDataset(str(tmp_path))) == len(NEW)


# ---- its own shards of before ---------------------------------------------------------------------------


def test_shards_of_another_time_are_believed_by_their_sums_alone(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    for checksum in (True, False):
        made = written(folder, NEW, checksum=checksum, overwrite=not checksum)
        before = digest(folder)
        os.utime(made.files[0], ns=(1, 1))
        damaged = Path(made.files[1])
        damaged.write_bytes(damaged.read_bytes().replace(b"new", b"NEW"))
        again = written(folder, NEW, checksum=checksum)
        assert (again.skipped, digest(folder)) == (2 if checksum else 1, before)
        assert written(folder, NEW, checksum=checksum).skipped == 3


def test_receipts_of_another_plan_or_of_files_of_other_sizes_are_none(tmp_path: Path) -> None:
    folder, file = OutputFolder(str(tmp_path)), tmp_path / "a.mds"
    file.write_bytes(b"1")
    folder.put_receipt(7, {"plan": "p", "shard": 7, "files": [file.name]})
    assert ([*folder.receipts("p")], folder.receipts("q")) == ([7], {})
    file.write_bytes(b"12")
    assert folder.receipts("p") == {}


def test_verify_reads_the_sums_of_shards_whose_times_are_right(tmp_path: Path) -> None:
    made = written(tmp_path, NEW)
    before, damaged = digest(tmp_path), Path(made.files[1])
    then = damaged.stat()
    damaged.write_bytes(damaged.read_bytes().replace(b"new", b"NEW"))
    os.utime(damaged, ns=(then.st_atime_ns, then.st_mtime_ns))
    assert written(tmp_path, NEW).skipped == 3
    assert (written(tmp_path, NEW, verify=True).skipped, digest(tmp_path)) == (2, before)


def test_what_lies_beside_a_shard_of_tokens_belongs_to_it(tmp_path: Path) -> None:
    rows = [{"tokens": [i, i + 1]} for i in range(4)]
    made = written(tmp_path, rows, "megatron")
    before = digest(tmp_path)
    Path(made.files[0]).with_suffix(".idx").unlink()
    os.utime(Path(made.files[1]).with_suffix(".idx"), ns=(1, 1))
    assert (written(tmp_path, rows, "megatron").skipped, digest(tmp_path)) == (0, before)


def test_a_source_that_is_damaged_is_known_by_its_checksums(tmp_path: Path) -> None:
    rows = [{"x": i, "k": f"sample {i}"} for i in range(30)]
    for at, way in enumerate(("mds", "parquet", "tar")):
        made = convert(rows, tmp_path / way, to=way, workers=1)
        shard, then = Path(made.files[0]), Path(made.files[0]).stat()
        data = bytearray(shard.read_bytes())
        data[max(40, data.find(b"sample 17"))] ^= 1
        shard.write_bytes(data)
        os.utime(shard, ns=(then.st_atime_ns, then.st_mtime_ns))
        for shuffle in (None, at):
            with pytest.raises(DataflowError, match="checksum"):
                convert(made.catalog, tmp_path / f"{way}-{shuffle}", to=way, workers=1, shuffle=shuffle)
