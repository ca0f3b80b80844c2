"""Joined datasets: what a loader and random access deliver, against a dict of the other's rows by key."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import Row, delivered, plain, write_tar
from http_kit import RangeServer, serving
from hypothesis import given, settings, strategies as st
from parameters_kit import in_pairs

from dataflow import (
    Cache,
    DataLoader,
    Image,
    Mixture,
    Optional,
    Packed,
    SampleError,
    ShardedDataset,
    Shuffle,
    Video,
)

KEYS = [f"{i:05d}" for i in range(47)]
GAPS = [key for i, key in enumerate(KEYS) if i % 5 != 2]
SHUFFLES = [None, Shuffle("window", window_blocks=4), Shuffle("blocks", window_blocks=3), Shuffle("full")]
FORMATS = ["tar", "tar.gz", "parquet", "arrow", "jsonl"]
WIDE = 1000.0
"""An amplification that nothing here reaches."""


def own_row(key: str) -> Row:
    return {"n": int(key), "text": f"own {key}"}


def other_row(key: str) -> Row:
    number = int(key)
    return {"caption": f"caption of {key} " + "é" * (number % 4), "score": number / 4}


def write(folder: Path, name: str, rows: Sequence[tuple[str, Row]], form: str, per_block: int) -> str:
    """Rows with their keys as two shards; the source."""
    folder.mkdir(exist_ok=True)
    for part, own in enumerate((rows[: len(rows) // 3], rows[len(rows) // 3 :])):
        path = folder / f"{name}-{part}.{form}"
        if form.startswith("tar"):
            write_tar(path, (m for key, row in own for m in _members(key, row)))
            continue
        table = pa.Table.from_pylist([{"id": key, **row} for key, row in own])
        if form == "parquet":
            pq.write_table(table, path, row_group_size=per_block)
        elif form == "arrow":
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
                writer.write_table(table, max_chunksize=per_block)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))
    return str(folder / f"{name}-*.{form}")


def _members(key: str, row: Row) -> list[tuple[str, bytes]]:
    text = {name: value for name, value in row.items() if isinstance(value, str)}
    return [(f"{key}.{name}.txt", value.encode()) for name, value in text.items()] + [
        (f"{key}.{name}.json", json.dumps(value).encode()) for name, value in row.items() if name not in text
    ]


def opened(source: str, **more: Any) -> ShardedDataset:
    """A dataset that delivers its columns under their names, whatever format it is of."""
    form = source.partition("*.")[2]
    block_bytes = {"tar": 4 * 1024, "jsonl": 200}.get(form, 1)
    dataset = ShardedDataset(source, block_bytes=block_bytes, **more)
    if form.startswith("tar") and "columns" not in more:
        more["columns"] = {name.rpartition(".")[0]: name for name in dataset.schema}
        return ShardedDataset(source, block_bytes=block_bytes, **more)
    return dataset


def key_of(source: str) -> str:
    return "__key__" if ".tar" in source else "id"


@dataclass
class Pair:
    """Two datasets on disk."""

    own: str
    other: str

    def joined(self, amplification: float = 2.0, **more: Any) -> ShardedDataset:
        columns = None if ".tar" in self.other else ["caption", "score"]
        own_columns = None if ".tar" in self.own else ["n", "text"]
        own = opened(self.own, **({"columns": own_columns} if own_columns else {}), **more)
        other = opened(self.other, **({"columns": columns} if columns else {}))
        return own.join(other, on=(key_of(self.own), key_of(self.other)), amplification=amplification)


def pair(
    folder: Path,
    own: str = "tar",
    other: str = "parquet",
    keys: Sequence[str] = KEYS,
    others: Sequence[str] = KEYS,
    per_block: int = 4,
) -> Pair:
    return Pair(
        write(folder, "own", [(key, own_row(key)) for key in keys], own, 3),
        write(folder, "other", [(key, other_row(key)) for key in others], other, per_block),
    )


def both(key: str) -> Row:
    return {**own_row(key), **other_row(key)}


def keys_of(rows: Sequence[Row]) -> list[str]:
    return [f"{row['n']:05d}" for row in rows]


def numbers(batches: Sequence[Sequence[Row]]) -> list[list[int]]:
    return [[row["n"] for row in batch] for batch in batches]


def own_only(dataset: ShardedDataset) -> ShardedDataset:
    """The same samples without what is joined to them: what defines the order."""
    view = dataset.select(["n"])
    view.joins = ()
    return view


pytestmark = [pytest.mark.filterwarnings("ignore:.*have no match:UserWarning"), pytest.mark.reads_here]


# ---- what is delivered -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("other", "shuffle"), in_pairs(FORMATS, SHUFFLES), ids=str)
def test_each_sample_brings_its_match_in_the_order_of_the_dataset(
    tmp_path: Path, other: str, shuffle: Shuffle | None
) -> None:
    joined = pair(tmp_path, "parquet" if other == "tar" else "tar", other, others=GAPS).joined(WIDE)
    assert len(joined) == len(GAPS)
    with (
        DataLoader(joined, 5, shuffle, seed=3) as loader,
        DataLoader(own_only(joined), 5, shuffle, seed=3) as own,
    ):
        for _ in range(2):
            batches = delivered(loader)
            assert numbers(batches) == numbers(delivered(own))
            rows = [row for batch in batches for row in batch]
            assert rows == [both(key) for key in keys_of(rows)]
            assert sorted(keys_of(rows)) == GAPS


@pytest.mark.full
@settings(max_examples=25)
@given(data=st.data())
def test_any_keys_in_any_order_and_any_blocks(data: st.DataObject, tmp_path_factory: Any) -> None:
    some = st.lists(st.sampled_from(KEYS), unique=True, min_size=1, max_size=20)
    own, others = data.draw(some), data.draw(some)
    expected = [key for key in own if key in others]
    folder = tmp_path_factory.mktemp("any")
    sets = pair(folder, "parquet", data.draw(st.sampled_from(["tar", "parquet"])), own, others, 3)
    if not expected:
        with pytest.raises(ValueError, match="no key in"):
            sets.joined(WIDE)
        return
    joined = sets.joined(WIDE)
    assert [plain_row(joined[i]) for i in range(len(joined))] == [both(key) for key in expected]
    shuffle = data.draw(st.sampled_from(SHUFFLES))
    with DataLoader(joined, 3, shuffle, num_workers=0) as loader:
        rows = [row for batch in delivered(loader) for row in batch]
    assert sorted(rows, key=lambda row: row["n"]) == [both(key) for key in sorted(expected)]
    report = joined.joins[0].report
    assert (report.without_match, report.unused) == (len(own) - len(expected), len(others) - len(expected))


def plain_row(sample: Mapping[str, Any]) -> Row:
    return {name: plain(value) for name, value in sample.items()}


def drawn(sample: Row, rng: np.random.Generator) -> Row:
    return {"n": sample["n"], "text": f"{sample['text']} {sample['caption']} {rng.integers(1 << 40)}"}


def test_processes_build_what_threads_and_random_access_give(tmp_path: Path) -> None:
    joined, shuffle = pair(tmp_path, others=GAPS).joined(transform=drawn), Shuffle("window", window_blocks=3)
    with DataLoader(joined, 5, shuffle, workers="thread") as loader:
        expected = delivered(loader)
    with DataLoader(joined, 5, shuffle, num_workers=2, timeout=60) as loader:
        assert delivered(loader) == expected
    by_number = {row["n"]: row for batch in expected for row in batch}
    assert [plain_row(joined[i]) for i in range(len(joined))] == [by_number[int(key)] for key in GAPS]


def test_images_of_the_other_are_drawn_by_the_sample_they_come_beside(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    noise = np.random.default_rng(0).integers(0, 255, (len(GAPS), 12, 16, 3), np.uint8)
    images = [
        (f"{key}.png", cv2.imencode(".png", pixels)[1].tobytes())
        for key, pixels in zip(GAPS, noise, strict=True)
    ]
    write_tar(tmp_path / "other-0.tar", images)
    own = opened(write(tmp_path, "own", [(key, own_row(key)) for key in KEYS], "parquet", 3), columns=["n"])
    crop = Image(size=6, crop="random_resized")
    joined = own.join(
        ShardedDataset(str(tmp_path / "other-0.tar"), decode={"png": crop}), on=("id", "__key__")
    )
    joined.seed = 7
    with DataLoader(joined, 4, Shuffle("window", window_blocks=3), seed=7) as loader:
        drawn = {
            n: pixels for batch in loader for n, pixels in zip(batch["n"].tolist(), batch["png"], strict=True)
        }
    for i, key in enumerate(GAPS):
        assert torch.equal(drawn[int(key)], joined[i]["png"])


def test_several_joins_follow_each_other(tmp_path: Path) -> None:
    joined = pair(tmp_path, others=GAPS).joined()
    third = [(key, {"third": int(key) * 2}) for key in GAPS if int(key) % 2]
    source = write(tmp_path, "third", third, "parquet", 5)
    twice = joined.join(opened(source, columns=["third"]), on=("__key__", "id"))
    with DataLoader(twice, 4, Shuffle("window", window_blocks=3)) as loader:
        rows = [row for batch in delivered(loader) for row in batch]
    assert sorted(keys_of(rows)) == [key for key, _ in third]
    assert rows == [{**both(key), "third": int(key) * 2} for key in keys_of(rows)]
    assert plain_row(twice[0]) == {**both(third[0][0]), "third": 2}


def test_views_of_a_joined_dataset_keep_the_matches(tmp_path: Path) -> None:
    joined = pair(tmp_path, "parquet", others=GAPS).joined()
    views = {
        "take": (joined.take(7), GAPS[:7]),
        "subset": (joined.subset(slice(3, None, 4)), GAPS[3::4]),
        "filter": (joined.filter(pc.field("n") > 20), [key for key in GAPS if int(key) > 20]),
    }
    for name, (view, keys) in views.items():
        with DataLoader(view, 4) as loader:
            assert [row for batch in delivered(loader) for row in batch] == [*map(both, keys)], name
    parts = joined.split({"a": 0.5, "b": 0.5})
    rows = [plain_row(part[i]) for part in parts.values() for i in range(len(part))]
    assert sorted(keys_of(rows)) == GAPS
    assert rows == [both(key) for key in keys_of(rows)]


@pytest.mark.parametrize("columns", [["score", "n"], ["caption"], ["n"]])
def test_selected_columns_come_alone(tmp_path: Path, columns: list[str]) -> None:
    joined = pair(tmp_path).joined().select(columns)
    expected = [{name: both(key)[name] for name in columns} for key in KEYS]
    with DataLoader(joined, 4) as loader:
        assert [row for batch in delivered(loader) for row in batch] == expected
    assert plain_row(joined[1]) == expected[1]


def test_a_mixture_takes_joined_datasets(tmp_path: Path) -> None:
    one, two = (pair(tmp_path / name, others=others).joined() for name, others in (("a", GAPS), ("b", KEYS)))
    with DataLoader(Mixture([one, two]), 4, Shuffle("window", window_blocks=3)) as loader:
        rows = [row for batch in delivered(loader) for row in batch]
    assert sorted(keys_of(rows)) == sorted(GAPS + KEYS)
    assert rows == [both(key) for key in keys_of(rows)]


def test_several_samples_may_have_one_match(tmp_path: Path) -> None:
    rows = [(KEYS[i // 3], {"n": i // 3, "text": f"own {KEYS[i // 3]}"}) for i in range(30)]
    own = write(tmp_path, "own", rows, "parquet", 4)
    other = write(tmp_path, "other", [(key, other_row(key)) for key in KEYS], "parquet", 4)
    with DataLoader(Pair(own, other).joined(), 4) as loader:
        assert [row for batch in delivered(loader) for row in batch] == [both(key) for key, _ in rows]


def test_lengths_may_be_those_of_a_joined_column(tmp_path: Path) -> None:
    lists = [(key, {"tokens": [int(key)] * (1 + int(key) % 4)}) for key in KEYS]
    joined = opened(write(tmp_path, "own", [(key, own_row(key)) for key in KEYS], "tar", 3)).join(
        opened(write(tmp_path, "other", lists[::-1], "parquet", 4), columns=["tokens"]),
        on=("__key__", "id"),
        amplification=WIDE,
    )
    with DataLoader(joined.select(["tokens"]), 2, batching=Packed(8, column="tokens")) as loader:
        tokens = [
            t for batch in loader for t in batch["tokens"].tokens[batch["tokens"].segment_ids > 0].tolist()
        ]
    assert sorted(tokens) == sorted(t for _, row in lists for t in row["tokens"])


def test_a_state_has_room_for_many_joins(tmp_path: Path) -> None:
    own, other = tables(tmp_path, {"id": range(8), "x": range(8)}, {"id": range(8), "y": range(8)})
    for number in range(5):
        own = own.join(other, on="id", suffix=f"_{number}")
    with DataLoader(own, 2) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DataLoader(own, 2) as loader:
        loader.load_state_dict(json.loads(json.dumps(state)))
        assert [batch["y_4"].tolist() for batch in loader] == [[2, 3], [4, 5], [6, 7]]


def test_lists_of_the_other_come_with_their_images(tmp_path: Path) -> None:
    cv2 = pytest.importorskip("cv2")
    rng = np.random.default_rng(0)
    lists = {key: rng.integers(0, 255, (int(key) % 3, 8, 8, 3), np.uint8) for key in GAPS}
    encoded = [[cv2.imencode(".png", image)[1].tobytes() for image in images] for images in lists.values()]
    other = pa.table({"id": GAPS, "pages": pa.array(encoded, pa.list_(pa.binary()))})
    pq.write_table(other, tmp_path / "other.parquet", row_group_size=4)
    own = opened(write(tmp_path, "own", [(key, own_row(key)) for key in KEYS], "tar", 3))
    pages = ShardedDataset(
        str(tmp_path / "other.parquet"), decode={"pages": Image(size=8, layout="HWC")}, columns=["pages"]
    )
    joined = own.join(pages, on=("__key__", "id"))
    with DataLoader(joined, 4, Shuffle("window", window_blocks=3)) as loader:
        for batch in loader:
            for n, images in zip(batch["n"], batch["pages"].rows(), strict=True):
                assert np.array_equal(images, lists[f"{n:05d}"][..., ::-1])


def test_clips_of_long_videos_of_the_other_are_those_of_random_access(tmp_path: Path) -> None:
    media = pytest.importorskip("media_kit", exc_type=pytest.skip.Exception)
    videos = [(key, media.video(100, first=1000 * i, noise=60, b="8M")) for i, key in enumerate(KEYS[:6])]
    assert min(len(value) for _, value in videos) > 256 << 10, "or they would be read whole anyway"
    write_tar(tmp_path / "other-0.tar", [(f"{key}.mp4", value) for key, value in reversed(videos)])
    own = opened(write(tmp_path, "own", [(key, own_row(key)) for key in KEYS[:6]], "parquet", 3))
    clips = ShardedDataset(str(tmp_path / "other-0.tar"), decode={"mp4": Video(frames=4, size=64)})
    joined = own.select(["n"]).join(clips, on=("id", "__key__"), amplification=WIDE)
    expected = {i: media.numbers_of(joined[i]["mp4"]) for i in range(6)}
    assert all(numbers[0] // 1000 == i for i, numbers in expected.items())
    assert len({numbers[0] % 1000 for numbers in expected.values()}) > 1, "drawn, not all alike"
    with DataLoader(joined, 2, True) as loader:
        found = {
            n: media.numbers_of(clip)
            for batch in loader
            for n, clip in zip(batch["n"].tolist(), batch["mp4"], strict=True)
        }
    assert found == expected


def test_actors_that_read_by_themselves_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ship_blocks=True"):
        DataLoader(pair(tmp_path).joined(), 4, num_workers=1, builders="ray")


# ---- names and keys --------------------------------------------------------------------------------------


def tables(folder: Path, own: Mapping[str, Any], other: Mapping[str, Any]) -> list[ShardedDataset]:
    folder.mkdir(exist_ok=True)
    for name, columns in (("own", own), ("other", other)):
        pq.write_table(pa.table(dict(columns)), folder / f"{name}.parquet", row_group_size=2)
    return [ShardedDataset(str(folder / f"{name}.parquet")) for name in ("own", "other")]


def test_names_that_both_deliver_take_a_suffix(tmp_path: Path) -> None:
    own, other = tables(tmp_path, {"id": [1, 2], "x": [1, 2]}, {"id": [2, 1], "x": [20, 10]})
    with pytest.raises(ValueError, match=r"both datasets deliver 'x'.*suffix="):
        own.join(other, on="id")
    joined = own.join(other, on="id", suffix="_other")
    assert [plain_row(joined[i]) for i in range(2)] == [
        {"id": 1, "x": 1, "x_other": 10},
        {"id": 2, "x": 2, "x_other": 20},
    ]
    with pytest.raises(ValueError, match="delivered twice"):
        own.join(other, on="id", suffix="")


def test_a_mask_is_called_after_its_column(tmp_path: Path) -> None:
    own, _ = tables(tmp_path, {"id": [1, 2], "x": [1, 2]}, {"id": [2, 1], "x": [None, 10]})
    other = ShardedDataset(
        str(tmp_path / "other.parquet"), decode={"x": Optional("int", default=-1, mask=True)}, columns=["x"]
    )
    joined = own.join(other, on="id", suffix="_b")
    (batch,) = DataLoader(joined, 2)
    assert {name: values.tolist() for name, values in batch.items()} == {
        "id": [1, 2],
        "x": [1, 2],
        "x_b": [10, -1],
        "x_b_mask": [True, False],
    }


def test_what_has_no_match_is_counted_and_named(tmp_path: Path) -> None:
    own, other = tables(tmp_path, {"id": ["a", "b", None, "d"]}, {"id": ["e", "a", None], "y": range(3)})
    with pytest.warns(UserWarning, match=r"3 of 4 samples have no match and are left out: 'b' in .*own"):
        joined = own.join(other, on="id")
    report = joined.joins[0].report
    assert (report.num_samples, report.without_match, report.unused) == (1, 3, 2)
    assert [text.split(" in ")[0] for text in report.first_without_match] == ["'b'", "None", "'d'"]
    assert [text.split(" in ")[0] for text in report.first_unused] == ["'e'", "None"]
    assert report.first_unused[0].endswith("other.parquet")


def test_a_view_of_the_other_brings_only_its_samples(tmp_path: Path) -> None:
    own, other = tables(tmp_path, {"id": [1, 2, 3, 4]}, {"id": [1, 2, 3, 3], "y": [1, 2, 3, 4]})
    joined = own.join(other.take(3), on="id")
    assert [plain_row(joined[i]) for i in range(len(joined))] == [{"id": n, "y": n} for n in (1, 2, 3)]


# ---- reads ---------------------------------------------------------------------------------------------


def test_an_order_that_is_unlike_is_refused_with_the_reads_it_takes(tmp_path: Path) -> None:
    mixed = [KEYS[i] for i in np.random.default_rng(0).permutation(len(KEYS))]
    sets = pair(tmp_path, others=mixed)
    with pytest.raises(ValueError, match=r"ordered unlike this dataset.*amplification=\d") as refused:
        sets.joined()
    needed = float(str(refused.value).rpartition("amplification=")[2].rstrip(")"))
    joined = sets.joined(needed)
    assert needed - 0.1 <= joined.joins[0].report.amplification <= needed
    with DataLoader(joined, 4) as loader:
        assert [row for batch in delivered(loader) for row in batch] == [*map(both, KEYS)]


def coarse(folder: Path) -> tuple[ShardedDataset, ShardedDataset]:
    """Blocks of one sample, and their matches in row groups of 1 MB, for 16 samples each."""
    noise, keys = np.random.default_rng(0), [f"{i:05d}" for i in range(96)]
    own = write(folder, "own", [(key, own_row(key)) for key in keys], "parquet", 1)
    rows = [(key, {"noise": noise.bytes(1 << 16)}) for key in keys]
    other = write(folder, "other", rows, "parquet", 16)
    return opened(own, columns=["n"]), opened(other, columns=["noise"], decode=None)


SMALL = Shuffle("window", window_blocks=4, canonical_nodes=1)


@pytest.mark.here  # how often blocks are read again depends on who holds them
def test_a_shuffle_that_reads_blocks_over_and_over_is_refused_with_its_reads(tmp_path: Path) -> None:
    (own, other), limit = coarse(tmp_path), 24 << 20
    with pytest.raises(ValueError, match=r"with this shuffle, an epoch reads .*amplification=\d") as refused:
        DataLoader(own.join(other, on="id"), 4, SMALL, memory_limit=limit)
    needed = float(str(refused.value).rpartition("amplification=")[2].rstrip(")"))
    joined, nbytes = own.join(other, on="id", amplification=needed), total_bytes(other)
    with DataLoader(joined, 4, SMALL, memory_limit=limit) as loader:
        assert sum(len(batch["n"]) for batch in loader) == 96
        assert 2 * nbytes < loader.stats().read_bytes - total_bytes(own) <= needed * nbytes


def total_bytes(dataset: ShardedDataset) -> int:
    return int(dataset.catalog.blocks.length.sum())


@pytest.mark.parametrize("shuffle", [None, SMALL], ids=["files", "window"])
def test_blocks_that_fit_in_memory_are_read_once(tmp_path: Path, shuffle: Shuffle | None) -> None:
    own, other = coarse(tmp_path)
    with DataLoader(own.join(other, on="id"), 4, shuffle, memory_limit=128 << 20) as loader:
        for _ in range(2):
            assert sum(len(batch["n"]) for batch in loader) == 96
        # Of the dataset itself, the next epoch may have begun.
        assert total_bytes(other) < loader.stats().read_bytes <= total_bytes(other) + 3 * total_bytes(own)


def test_remote_keys_are_read_alone_and_a_cache_keeps_the_blocks_of_both(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    coarse(tmp_path / "files")
    write(tmp_path / "files", "tar", [(f"{i:05d}", {"text": "x" * 4000}) for i in range(96)], "tar", 1)
    with serving(RangeServer(tmp_path / "files")) as server:
        cache = Cache(tmp_path / "cache", limit="100MB")
        own, other, text = (
            ShardedDataset([f"{server.url}/{name}-{part}.{form}" for part in (0, 1)], cache=cache, **more)
            for name, form, more in (
                ("own", "parquet", {"columns": ["n"]}),
                ("other", "parquet", {"columns": ["noise"], "decode": None}),
                ("tar", "tar", {}),
            )
        )
        server.asked.clear()
        joined = text.join(own, on=("__key__", "id")).join(other, on=("__key__", "id"))
        assert 0 < sum(one.nbytes for one in server.asked) < total_bytes(other) // 20
        with DataLoader(joined, 4, SMALL, memory_limit="128MB") as loader:
            first = [n for batch in loader for n in batch["n"].tolist()]
        server.asked.clear()
        with DataLoader(joined, 4, SMALL, memory_limit="128MB") as loader:
            assert [n for batch in loader for n in batch["n"].tolist()] == first
        assert not [one for one in server.asked if one.nbytes and "own" not in one.name]  # too small to keep


# ---- bad samples -----------------------------------------------------------------------------------------


def with_bad(folder: Path, **more: Any) -> ShardedDataset:
    """The 10th caption is not JSON."""
    own = write(folder, "own", [(key, own_row(key)) for key in KEYS], "tar", 3)
    members = [(f"{key}.json", b"{" if i == 10 else b'{"a": 1}') for i, key in enumerate(KEYS)]
    write_tar(folder / "other-0.tar", members)
    return opened(own, **more).join(opened(str(folder / "other-*.tar"), columns={"info": "json"}))


def test_a_bad_value_of_the_other_names_its_shard_and_key(tmp_path: Path) -> None:
    joined = with_bad(tmp_path)
    for read in (lambda: delivered(DataLoader(joined, 4)), lambda: joined[10]):
        with pytest.raises(SampleError, match="column 'info'") as caught:
            read()
        assert caught.value.shard.endswith("other-0.tar")
        assert caught.value.key == KEYS[10]


def test_a_bad_value_of_the_other_leaves_the_sample_out(tmp_path: Path) -> None:
    with DataLoader(with_bad(tmp_path, on_error="skip"), 4) as loader:
        rows = [row for batch in delivered(loader) for row in batch]
        assert keys_of(rows) == KEYS[:10] + KEYS[11:]
        assert loader.stats().skipped_samples == 1


def test_a_missing_number_of_the_other_is_an_error_or_leaves_the_sample_out(tmp_path: Path) -> None:
    gaps = [10, None, 12, 13, 14, None]
    tables(tmp_path, {"id": range(6)}, {"id": range(6), "y": pa.array(gaps)})
    for on_error in ("raise", "skip"):
        own = ShardedDataset(str(tmp_path / "own.parquet"), on_error=on_error)
        joined = own.join(ShardedDataset(str(tmp_path / "other.parquet"), columns=["y"]), on="id")
        with pytest.raises(SampleError, match="column 'y': the sample lacks"):
            joined[1]
        with DataLoader(joined, 3) as loader:
            if on_error == "raise":
                with pytest.raises(SampleError, match="column 'y': the sample lacks"):
                    delivered(loader)
            else:
                assert [n for batch in loader for n in batch["y"].tolist()] == [10, 12, 13, 14]
