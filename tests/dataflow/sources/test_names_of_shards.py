"""Folders and files of any name, over any store: what exists by a name is that, a chosen folder is one."""

from __future__ import annotations

import io
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from http_kit import RangeServer, s3_server, serving
from hub_server import HubServer, Repo
from parameters_kit import in_full

from dataflow import DataLoader, ShardedDataset, ShardWriter
from sharding.errors import CorruptShardError, DataflowError, ShardReadError

pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]  # aiobotocore's sessions

STORES = ["local", "memory", "http", *in_full("s3", "hub")]
LISTED = ["local", "memory", *in_full("s3", "hub")]
WRITABLE = ["local", "memory", *in_full("s3")]


@dataclass
class Place:
    """A folder of a store."""

    root: str
    put: Callable[[str, bytes], None]
    options: dict[str, Any]
    quotes: str = ""
    """Signs that a URL has in another form there."""

    def url(self, name: str) -> str:
        return self.root + "/" + "".join(quote(s) if s in self.quotes else s for s in name)

    def values(self, source: Any, **options: Any) -> list[int]:
        dataset = ShardedDataset(source, storage_options=self.options, **options)
        with DataLoader(dataset, 1, num_workers=0) as loader:
            return [value for batch in loader for value in batch["x"].tolist()]


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    store, name = request.param, uuid.uuid4().hex

    def put_file(path: str, content: bytes) -> None:
        (tmp_path / name / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / path).write_bytes(content)

    with ExitStack() as stack:
        if store == "local":
            yield Place(str(tmp_path / name), put_file, {})
        elif store == "memory":
            fs = fsspec.filesystem("memory")
            yield Place(
                f"memory://{name}", lambda path, data: fs.pipe_file(f"memory://{name}/{path}", data), {}
            )
        elif store == "s3":
            pytest.importorskip("s3fs")
            s3 = stack.enter_context(s3_server())
            put = lambda path, data: s3.objects.update({f"{name}/d/{path}": data})  # noqa: E731
            yield Place(f"s3://{name}/d", put, s3.options)
        elif store == "http":
            server = stack.enter_context(serving(RangeServer(tmp_path / name)))
            yield Place(server.url, put_file, {}, quotes="%#?")
        else:
            pytest.importorskip("huggingface_hub")
            hub, files = stack.enter_context(HubServer().serving()), dict[str, bytes]()

            def commit(path: str, content: bytes) -> None:
                files[path] = content
                hub.repos.setdefault(f"org/{name}", Repo()).commit(files)

            yield Place(f"hf://datasets/org/{name}", commit, {"endpoint": hub.url, "token": False})


def parquet(*values: int) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"x": pa.array(values, pa.int64())}), out)
    return out.getvalue()


NAMES = ["a [v2]", "b{1,2}", "c{", "d?", "e*", "f 50%", "g::h", "[i]"]
"""The file is in a folder of this name, and called so itself."""


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_what_exists_by_a_name_is_that_alone_in_a_list_and_by_its_url(place: Place) -> None:
    for number, name in enumerate(NAMES):
        place.put(f"{name}/{name}.parquet", parquet(number))
    urls = [place.url(f"{name}/{name}.parquet") for name in NAMES]
    assert [place.values(url) for url in urls] == [[number] for number in range(len(NAMES))]
    dataset = ShardedDataset(urls, storage_options=place.options, columns=["x", "__url__"])
    for number in range(len(NAMES)):
        assert place.values(dataset[number]["__url__"]) == [dataset[number]["x"]] == [number]


@pytest.mark.parametrize("place", LISTED, indirect=True)
def test_a_glob_below_folders_of_any_name_works(place: Place) -> None:
    folder = "[D] 50%#1/{x}"
    for name, value in (("a1", 1), ("a2", 2), ("b", 3), ("sub/a3", 4)):
        place.put(f"{folder}/{name}.parquet", parquet(value))
    place.put("D/x/a9.parquet", parquet(9))
    for name in ("{p,q}/y.parquet", "{p,q}/z.parquet", "r{/y1.parquet"):
        place.put(name, parquet(7))
    assert place.values(place.url("{p,q}/{y,z}.parquet")) == [7, 7]
    assert place.values(place.url("r{/y*.parquet")) == [7]
    assert place.values(place.url(f"{folder}/a*.parquet")) == [1, 2]
    assert place.values(place.url(f"{folder}/**/a?.parquet")) == [1, 2, 4]
    assert place.values([place.url(f"{folder}/[b].parquet"), place.url(f"{folder}/a1.parquet")]) == [3, 1]
    below = [4] if place.root.startswith("hf") else []  # where the layout decides
    assert place.values(place.url(f"{folder}/")) == [1, 2, 3, *below]
    assert place.values(place.url("[[]D*/*/sub/*.parquet")) == [4]


@pytest.mark.parametrize("place", LISTED, indirect=True)
def test_split_of_a_folder_of_any_name(place: Place) -> None:
    place.put("[D] 1/data/train-00000-of-00001.parquet", parquet(1))
    place.put("[D] 1/data/test-00000-of-00001.parquet", parquet(2))
    assert place.values(place.url("[D] 1"), split="train") == [1]


@pytest.mark.parametrize("place", WRITABLE, indirect=True)
def test_what_was_written_is_read_by_the_same_string(place: Place) -> None:
    for name in ("[D] 50%#1{x}", "a::b", "c*?"):
        pattern = place.url(f"{name}/w-%04d.jsonl")
        with ShardWriter(pattern, max_count=1, storage_options=place.options) as writer:
            for i in range(2):
                writer.write({"x": i})
        assert [place.values(shard.url) for shard in writer.shards] == [[0], [1]]
        assert place.values(pattern.replace("%04d", "*")) == [0, 1]


def test_relative_paths_may_have_any_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a::b").mkdir()
    (tmp_path / "a::b" / "x.parquet").write_bytes(parquet(1))
    place = Place("", lambda *_: None, {})
    assert place.values("a::b/x.parquet") == place.values("a::b/*.parquet") == place.values("a::b") == [1]


# Folders


@pytest.mark.parametrize("place", LISTED, indirect=True)
def test_a_chosen_folder_is_a_folder_in_lists_and_braces_and_globs(place: Place) -> None:
    place.put("a.parquet", parquet(1))
    place.put("x.parquet/part-0.parquet", parquet(2, 3))
    place.put("x.parquet/_SUCCESS", b"")
    folder = place.url("x.parquet")
    assert place.values(folder) == place.values([folder]) == place.values([f"{folder}/"]) == [2, 3]
    assert place.values([folder, place.url("a.parquet")]) == [2, 3, 1]
    assert place.values(place.url("{a,x}.parquet")) == [1, 2, 3]
    assert place.values(place.url("*.parquet")) == place.values(place.url("**/*.parquet")) == [1, 2, 3]


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_an_empty_object_that_stands_for_a_folder_is_none(place: Place) -> None:
    for marker in ("x.parquet", "x.parquet/"):
        place.put(marker, b"")
    place.put("x.parquet/part-0.parquet", parquet(2, 3))
    place.put("a.parquet", parquet(1))
    folder = place.url("x.parquet")
    assert place.values(folder) == place.values(f"{folder}/") == [2, 3]
    assert place.values([place.url("a.parquet"), folder]) == [1, 2, 3]
    assert place.values(place.root) == [1]
    assert place.values(place.url("*.parquet")) == [1, 2, 3]


@pytest.mark.parametrize("place", LISTED, indirect=True)
def test_empty_files_of_text_have_no_samples_and_other_empty_files_are_errors(place: Place) -> None:
    place.put("d/a.jsonl", b'{"x": 1}\n')
    place.put("d/b.jsonl", b"")
    assert place.values(place.url("d")) == place.values(place.url("d/*.jsonl")) == [1]
    assert place.values([place.url("d/b.jsonl"), place.url("d/a.jsonl")]) == [1]
    place.put("mixed/a.parquet", parquet(4))
    place.put("mixed/b.jsonl", b"")
    if not place.root.startswith("hf"):  # where the layout decides
        assert place.values(place.url("mixed")) == [4]
    place.put("e/a.parquet", parquet(4))
    place.put("e/b.parquet", b"")
    with pytest.raises(CorruptShardError, match="is empty"):
        place.values([place.url("e/a.parquet"), place.url("e/b.parquet")])
    place.put("g/a.jsonl.gz", b"")
    with pytest.raises(CorruptShardError, match="is empty"):
        place.values(place.url("g/a.jsonl.gz"))
    with pytest.raises(DataflowError, match="the dataset is empty"):
        place.values(place.url("d/b.jsonl"))


@pytest.mark.parametrize("place", ["memory"], indirect=True)
def test_a_name_of_nothing_stays_an_error_that_names_it(place: Place) -> None:
    place.put("a.parquet", parquet(1))
    with pytest.raises(ShardReadError, match=r"b\.parquet: no such file"):
        place.values(place.url("{a,b}.parquet"))
