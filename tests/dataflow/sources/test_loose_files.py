"""Loose files: what a folder, a glob or a list of them delivers, and what is said where it cannot."""

from __future__ import annotations

import os
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pytest
from datasets_kit import plain, rank

from dataflow import (
    DataLoader,
    MemoryLimitError,
    SampleError,
    ShardedDataset,
    ShardReadError,
    ShardWriter,
    Shuffle,
)
from dataflow.sources.file_catalogs import LooseFiles
from dataflow.sources.loose import find_loose
from sharding.errors import ShardChangedError

RAW: Mapping[str, Any] = {"jpg": None}
ODD = {
    "cat/1.jpg": b"one",
    "cat/2 ü[1]{2}.jpg": b"two",
    "cat/no\nline.JPG": b"three",
    "cat/x/4.jpg": b"four",
    "cat/x-/5.jpg": b"five",
    "cat/x/y/0.jpg": b"zero",
    "dog/v1.2/6.3.jpg": b"six",
}
"""In the order of torchvision's ImageFolder: by class, folder and name."""
CLUTTER = (".DS_Store", "cat/._1.jpg", "cat/Thumbs.db", "cat/.cache/7.jpg", "dog/notes.txt", "__MACOSX/8.jpg")


def write(folder: Path, files: Mapping[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def opened(source: Any, **more: Any) -> ShardedDataset[dict[str, Any]]:
    columns = ["__key__", "jpg", *more.pop("columns", ())]
    return ShardedDataset(source, columns=columns, decode=RAW, **more)


def rows(dataset: ShardedDataset[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: plain(value) for name, value in dataset[i].items()} for i in range(len(dataset))]


def keys(dataset: ShardedDataset[dict[str, Any]]) -> list[str]:
    return [row["__key__"] for row in rows(dataset)]


def found(source: Any, **more: Any) -> LooseFiles:
    files = find_loose(str(source), **more)
    assert files is not None
    return files


# ---- what they are ------------------------------------------------------------------------------------


def test_a_folder_of_class_folders_is_what_image_folder_makes_of_it(tmp_path: Path) -> None:
    write(tmp_path, ODD)
    write(tmp_path, dict.fromkeys(CLUTTER, b"clutter"))
    dataset = opened(tmp_path, columns=["cls"])
    assert [row["__key__"] for row in rows(dataset)] == [name.rpartition(".")[0] for name in ODD]
    assert [bytes(row["jpg"]) for row in rows(dataset)] == list(ODD.values())
    assert [row["cls"] for row in rows(dataset)] == [0, 0, 0, 0, 0, 0, 1]
    assert dataset.features == {"cls": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    codec = dataset.catalog.codec()
    footers = dataset.catalog.rows.column("footer").to_pylist()
    assert sum(map(codec.num_passed_over, footers)) == len(CLUTTER)


@pytest.mark.reads_here
def test_a_store_gives_the_same_samples_as_a_disk(tmp_path: Path) -> None:
    local = opened(write(tmp_path, ODD), columns=["cls"])
    store = fsspec.filesystem("memory")
    for name, content in ODD.items():
        store.pipe(f"/loose/{name}", content)
    remote = opened("memory://loose", columns=["cls"])
    assert rows(remote) == rows(local)
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 1}
    with DataLoader(remote, **options) as one, DataLoader(local, **options) as other:
        assert [batch["__key__"] for batch in one] == [batch["__key__"] for batch in other]
    assert keys(opened("memory://loose/*/*.jpg")) == ["cat/1", "cat/2 ü[1]{2}"]


def test_a_tar_written_of_them_has_the_same_samples(tmp_path: Path) -> None:
    dataset = opened(write(tmp_path / "files", {"b/2.jpg": b"two", "a/1.jpg": b"one"}), columns=["cls"])
    with ShardWriter(f"{tmp_path}/%03d.tar", max_count=1) as writer:
        for row in rows(dataset):
            writer.write({**row, "jpg": bytes(row["jpg"])})
    assert rows(opened(tmp_path / "*.tar", columns=["cls"])) == rows(dataset)


def test_files_without_folders_of_classes_have_no_class(tmp_path: Path) -> None:
    write(tmp_path, {"2.jpg": b"two", "1.jpg": b"one", "notes/a.txt": b"text"})
    dataset = opened(tmp_path)
    assert keys(dataset) == ["1", "2"]
    assert list(dataset.schema) == ["jpg"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("**/*.jpg", ["a/1", "a/deep/2", "b/3"]),
        ("*/*.jpg", ["a/1", "b/3"]),
        ("a/**/*.jpg", ["1", "deep/2"]),
        ("{b,a}/*.jpg", ["b/3", "a/1"]),
        ("a/*.{jpg,png}", ["1"]),
        ("a/1.jpg", ["1"]),
    ],
)
def test_a_pattern_stands_for_the_files_that_match(pattern: str, expected: list[str], tmp_path: Path) -> None:
    write(
        tmp_path, {"b/3.jpg": b"", "a/1.jpg": b"", "a/deep/2.jpg": b"", "a/._1.jpg": b"", "a/4.png.txt": b""}
    )
    if "{jpg" in pattern:
        write(tmp_path, {"a/5.png": b""})
        assert list(ShardedDataset(f"{tmp_path}/{pattern}", decode=None).schema) == ["jpg", "png"]
        return
    assert keys(opened(f"{tmp_path}/{pattern}")) == expected


def test_a_list_keeps_its_order_and_takes_each_file_once(tmp_path: Path) -> None:
    write(tmp_path, {"a[1]/1.jpg": b"", "a[1]/2.jpg": b"", "b/3.jpg": b""})
    sources = [f"{tmp_path}/b/3.jpg", f"{tmp_path}/a[1]/2.jpg", f"{tmp_path}/*/*.jpg"]
    assert keys(opened(sources)) == ["b/3", "a[1]/2", "a[1]/1"]


def test_alternatives_take_images_of_several_endings(tmp_path: Path) -> None:
    write(tmp_path, {"a/1.jpg": b"1", "a/2.JPEG": b"2", "b/3.png": b"3"})
    dataset = ShardedDataset(tmp_path, columns={"image": "jpg|jpeg|png"}, decode=None)
    assert [bytes(row["image"]) for row in rows(dataset)] == [b"1", b"2", b"3"]
    with (
        pytest.raises(SampleError, match=r"takes the first of these members"),
        DataLoader(ShardedDataset(tmp_path, decode=None)) as loader,
    ):
        next(iter(loader))


def test_any_ending_is_read_where_the_format_is_named(tmp_path: Path) -> None:
    write(tmp_path, {"1.txt": b"one", "2.txt": b"two", "README": b"", "Thumbs.db": b""})
    assert [row["txt"] for row in rows(ShardedDataset(tmp_path, format="files"))] == ["one", "two"]


def test_few_images_beside_shards_are_no_samples(tmp_path: Path) -> None:
    write(
        tmp_path, {"data/train-00000-of-00001.jsonl": b'{"a": 1}\n', "assets/1.png": b"", "assets/2.png": b""}
    )
    assert rows(ShardedDataset(tmp_path)) == [{"a": 1}]


def test_links_are_followed(tmp_path: Path) -> None:
    elsewhere = write(tmp_path / "elsewhere", {"1.jpg": b"one"})
    folder = write(tmp_path / "train", {"a/0.jpg": b"zero"})
    (folder / "b").symlink_to(elsewhere)
    (folder / "a" / "2.jpg").symlink_to(elsewhere / "1.jpg")
    assert keys(opened(folder)) == ["a/0", "a/2", "b/1"]


def test_files_of_one_name_in_several_folders_fall_into_parts_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "here", {f"{a}/1.jpg": b"" for a in range(64)})
    part = keys(opened(tmp_path / "here").split({"one": 0.5})["one"])
    assert 16 < len(part) < 48
    (tmp_path / "here").rename(tmp_path / "there")
    assert keys(opened(tmp_path / "there").split({"one": 0.5})["one"]) == part


# ---- order, state, catalog --------------------------------------------------------------------------------


def test_a_loader_resumes_on_other_ranks_over_a_folder_listed_anew(tmp_path: Path) -> None:
    write(tmp_path, {f"{n % 3}/{n:02d}.jpg": b"%d" % n for n in range(23)})
    options: dict[str, Any] = {"batch_size": 2, "shuffle": True, "seed": 3, "tail": "uneven"}
    with DataLoader(opened(tmp_path), **options, topology=rank(0, 1)) as loader:
        whole = [key for batch in loader for key in batch["__key__"]]
    assert len({*whole}) == 23
    with DataLoader(opened(tmp_path), **options, topology=rank(0, 1)) as loader:
        for _ in islice(loader, 4):
            pass
        state = loader.state_dict()
    rest = list[str]()
    for r in range(2):
        with DataLoader(opened(tmp_path), **{**options, "batch_size": 1}, topology=rank(r, 2)) as loader:
            loader.load_state_dict(state)
            rest += [key for batch in loader for key in batch["__key__"]]
    assert sorted(rest) == sorted(whole[8:])


def test_a_catalog_is_kept_where_it_is_asked_for_and_made_anew_when_files_change(tmp_path: Path) -> None:
    folder, path = write(tmp_path / "files", {"a/1.jpg": b"1"}), tmp_path / "kept.catalog"
    opened(folder, catalog=path)
    before = path.stat().st_mtime_ns
    assert keys(opened(folder, catalog=path)) == ["a/1"]
    assert path.stat().st_mtime_ns == before
    write(folder, {"b/2.jpg": b"2"})
    assert keys(opened(folder, catalog=path)) == ["a/1", "b/2"]
    assert rows(opened(path)) == rows(opened(folder))
    assert opened(path).features == opened(folder).features


# ---- what is wrong ----------------------------------------------------------------------------------------


def test_files_that_changed_since_they_were_listed_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"a/1.jpg": b"one", "a/2.jpg": b"two", "a/3.jpg": b"three"})
    dataset = opened(tmp_path)
    (tmp_path / "a" / "1.jpg").unlink()
    (tmp_path / "a" / "2.jpg").write_bytes(b"tw")
    os.utime(tmp_path / "a" / "3.jpg", ns=(5, 5))
    for number, error, text in (
        (0, ShardReadError, r"a/1\.jpg.*no such file"),
        (1, ShardChangedError, r"a/2\.jpg.*its size is 2 bytes; it was 3 when it was indexed"),
        (2, ShardChangedError, r"a/3\.jpg.*its modification time is 5"),
    ):
        with pytest.raises(error, match=text) as caught:
            dataset[number]
        assert "open it again" in caught.value.__notes__[0]


def test_an_empty_file_is_a_bad_sample_that_may_be_skipped(tmp_path: Path) -> None:
    write(tmp_path, {"a/1.jpg": b"", "a/2.jpg": b"no picture"})
    with pytest.raises(SampleError, match=r"a/1\.jpg.*sample 'a/1'.*empty"):
        ShardedDataset(tmp_path)[0]
    with DataLoader(ShardedDataset(tmp_path, on_error="skip"), batch_size=1) as loader:
        assert list(loader) == []
        assert loader.stats().skipped_samples == 2


@pytest.mark.reads_here
@pytest.mark.parametrize("shuffle", [False, "full"])
def test_a_file_that_the_memory_limit_has_no_room_for_is_named(shuffle: Any, tmp_path: Path) -> None:
    write(tmp_path, {f"{n}.jpg": b"1" for n in range(4)})
    os.truncate(tmp_path / "3.jpg", 1 << 30)
    dataset = opened(tmp_path)
    with (
        pytest.raises(MemoryLimitError, match=rf"largest block: 1,073,741,824 bytes .* {tmp_path}/3\.jpg\)"),
        DataLoader(dataset, 2, shuffle=shuffle and Shuffle(shuffle), memory_limit="20MB") as loader,
    ):
        list(loader)


def test_pipes_are_left_out_as_nobody_reads_them_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"a/1.jpg": b"1"})
    os.mkfifo(tmp_path / "a" / "2.jpg")
    assert keys(opened(tmp_path)) == keys(opened(f"{tmp_path}/*/*.jpg", format="files")) == ["a/1"]


@pytest.mark.parametrize("remote", [False, True])
def test_a_split_is_the_folder_that_is_called_so(remote: bool, tmp_path: Path) -> None:
    files = {"train/a/1.jpg": b"1", "val/a/2.jpg": b"2", "val/b/3.jpg": b"3", "notes/n.txt": b"n"}
    source = str(write(tmp_path, files))
    if remote:
        source = "memory://splits"
        for name, content in files.items():
            fsspec.filesystem("memory").pipe(f"/splits/{name}", content)
    for split, expected in (("train", ["a/1"]), ("validation", ["a/2", "b/3"]), ("val", ["a/2", "b/3"])):
        assert keys(opened(source, split=split)) == expected
    with pytest.raises(ValueError, match=r"split must be one of train, validation: .*; got 'test'"):
        ShardedDataset(source, split="test")
    with pytest.raises(ValueError, match=r"a folder for each split \(notes, train, val\).*split='train'"):
        ShardedDataset(source)


def test_classes_may_be_called_like_one_split(tmp_path: Path) -> None:
    write(tmp_path, {"train/1.jpg": b"1", "plane/2.jpg": b"2"})
    assert keys(opened(tmp_path)) == ["plane/2", "train/1"]


def test_a_split_of_shards_is_no_split_of_files(tmp_path: Path) -> None:
    write(tmp_path, {"train/0.jsonl": b'{"a": 1}\n', "test/0.jsonl": b'{"a": 2}\n'})
    assert rows(ShardedDataset(tmp_path, split="test")) == [{"a": 2}]


def test_files_beside_folders_of_classes_are_left_out_with_a_warning(tmp_path: Path) -> None:
    write(tmp_path, {"0.jpg": b"0", "a/1.jpg": b"1"})
    with pytest.warns(UserWarning, match=r"1 files such as 0\.jpg lie in .* beside the folders of classes"):
        assert keys(opened(tmp_path)) == ["a/1"]


def test_images_of_one_name_are_samples_in_folders_and_globs_alike(tmp_path: Path) -> None:
    write(tmp_path, {"a/1.jpg": b"1", "a/1.png": b"2"})
    for source in (tmp_path, f"{tmp_path}/*/*"):
        dataset = ShardedDataset(source, format="files", columns={"image": "jpg|png"}, decode=None)
        assert [bytes(row["image"]) for row in rows(dataset)] == [b"1", b"2"]


def test_links_that_lead_nowhere_or_in_a_circle_are_named(tmp_path: Path) -> None:
    write(tmp_path, {"a/1.jpg": b"1"})
    (tmp_path / "a" / "2.jpg").symlink_to(tmp_path / "gone.jpg")
    with pytest.raises(ShardReadError, match=r"a/2\.jpg: is a link to a file that is not there"):
        ShardedDataset(tmp_path)
    (tmp_path / "a" / "2.jpg").unlink()
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    with pytest.raises(ShardReadError, match=r"a/again: is a link to a folder that it lies in"):
        ShardedDataset(tmp_path)


def test_a_name_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with open(os.fsencode(tmp_path) + b"/a/\xff.jpg", "wb"):
        pass
    with pytest.raises(ValueError, match=r"a/\\udcff\.jpg has a name that is not UTF-8"):
        ShardedDataset(tmp_path)


def test_a_listing_has_sizes_and_versions(tmp_path: Path) -> None:
    write(tmp_path, ODD)
    files = found(tmp_path)
    assert files.sizes.tolist() == [len(content) for content in ODD.values()]
    assert files.versions == [f"mtime:{(tmp_path / name).stat().st_mtime_ns}" for name in ODD]
