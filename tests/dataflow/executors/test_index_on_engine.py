"""A catalog is the same whoever looked at the shards."""

from __future__ import annotations

import pickle
from concurrent.futures import Executor, Future
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from parameters_kit import in_full

from dataflow import ShardError, ShardWriter
from dataflow.sources.tasks import in_order, shared_out
from dataflow.tools.terminal.indexing import index_source
from sharding.formats.tar.format import TarFormat

FIXTURES = Path(__file__).parents[2] / "fixtures"


class Elsewhere(Executor):
    """Calls what crossed to it as bytes, as another machine does."""

    def __init__(self) -> None:
        self.calls = 0

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.calls += 1
        function, args = pickle.loads(pickle.dumps((function, args)))
        future: Future[Any] = Future()
        future.set_result(pickle.loads(pickle.dumps(function(*args))))
        return future


def shards_in(folder: Path, ending: str) -> str:
    for shard in range(5):
        with ShardWriter(f"{folder}/{shard}.{ending}") as writer:
            for i in range(3 + shard):
                writer.write({"__key__": f"{shard}-{i}", "txt": f"text {i}", "cls": i})
    return f"{folder}/*.{ending}"


@pytest.mark.parametrize("checksum", [False, *in_full(True)])
@pytest.mark.parametrize("ending", ["tar", *in_full("parquet", "jsonl")])
def test_a_catalog_made_elsewhere_has_the_bytes_of_one_made_here(
    ending: str, checksum: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(shards_in(tmp_path, ending), tmp_path, num_calls=10 if checksum else 5, checksum=checksum)
    assert "samples" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["merged", *in_full("all")])
def test_what_an_index_file_says_of_a_shard_goes_along_with_it(folder: str, tmp_path: Path) -> None:
    compare(str(FIXTURES / "mds" / folder), tmp_path)


def compare(source: str, tmp_path: Path, num_calls: int | None = None, **options: Any) -> None:
    executor, found = Elsewhere(), []
    for where in (None, executor):
        path = tmp_path / f"{len(found)}.catalog"
        index_source([source], {}, output=str(path), block_bytes=None, executor=where, **options)
        found.append(path.read_bytes())
    assert found[0] == found[1]
    assert executor.calls == (num_calls or executor.calls)
    assert executor.calls > 0


def test_bad_shards_are_counted_when_all_were_tried_and_say_where_they_were_looked_for(
    tmp_path: Path,
) -> None:
    source = shards_in(tmp_path, "tar")
    for shard in (1, 3):
        (tmp_path / f"{shard}.tar").write_bytes(b"no tar")
    with pytest.raises(ShardError, match=r"1\.tar") as caught:
        index_source([source], {}, output=None, block_bytes=None, executor=Elsewhere())
    notes = " ".join(caught.value.__notes__)
    assert "1 of the other 4 shards" in notes
    assert "local paths must be the same on all machines" in notes


class SeenTar(TarFormat):
    """The format of tars, and the names of those that were looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = list[str]()

    def scan(self, file: Any, shard: Any, *, block_bytes: int) -> Any:
        self.seen.append(Path(shard.url).name)
        return super().scan(file, shard, block_bytes=block_bytes)


def test_an_index_that_failed_goes_on_with_shards_that_are_new_or_were_not_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.sources.indexing._KEPT_TOGETHER", 2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source, good = shards_in(tmp_path, "tar"), (tmp_path / "3.tar").read_bytes()
    (tmp_path / "3.tar").write_bytes(b"no tar")
    catalogs, seen = [], []
    for name in ("failed", "resumed", "anew"):
        codec, path = SeenTar(), tmp_path / f"{name}.catalog"
        with pytest.raises(ShardError) if name == "failed" else nullcontext():
            index_source([source], {"format": codec}, output=str(path), block_bytes=None)
            catalogs.append(path.read_bytes())
        seen.append(sorted(codec.seen))
        if name == "failed":
            (tmp_path / "3.tar").write_bytes(good)
            (tmp_path / "0.tar").write_bytes((tmp_path / "1.tar").read_bytes())
            assert len(list((tmp_path / "cache/dataflow/catalogs").glob("*.parts/*"))) == 2
    assert seen == [[f"{i}.tar" for i in range(5)], ["0.tar", "3.tar"], [f"{i}.tar" for i in range(5)]]
    assert catalogs[0] == catalogs[1]
    assert list((tmp_path / "cache/dataflow/catalogs").glob("*.parts")) == []


def test_tasks_are_many_and_none_is_large() -> None:
    assert [len(part) for part in shared_out(range(3), 1000)] == [1, 1, 1]
    assert len(list(shared_out(range(1280), 1000))) == 64
    assert [len(part) for part in shared_out(range(200_100), 1000)] == [1000] * 200 + [100]


def test_results_are_put_in_order() -> None:
    assert list(in_order(iter([(2, "c"), (0, "a"), (1, "b")]))) == ["a", "b", "c"]
