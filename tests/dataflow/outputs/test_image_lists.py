"""Several images a sample: one tensor a batch with offsets, or lists, wherever batches are built."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image as Pillow

from dataflow import DataLoader, Image, Ragged, SampleError, ShardedDataset, ShardWriter
from dataflow.batch.samples import drop_rows
from dataflow.decode.image import decode_image
from dataflow.decode.values import DRAWS
from sharding.errors import CorruptShardError
from sharding.order.permutations import uniform

MEDIA = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
FEATURES = {"images": {"feature": {"_type": "Image"}, "_type": "List"}}
DRAWN = Image(size=12, crop="random_resized", flip=0.5)
COUNTS = [3, 0, 1, 12, 2, 0, 4, 1, 1, 5]
SEED, EPOCH = 7, 0


def png(number: int) -> bytes:
    pixels = np.random.default_rng(number).integers(0, 256, (10 + number % 7, 14, 3), np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


IMAGES = [[png(100 * row + item) for item in range(count)] for row, count in enumerate(COUNTS)]


def parquet(path: Path, rows: Sequence[Any], kind: pa.DataType = MEDIA, *, group: int = 4) -> str:
    metadata = {"huggingface": json.dumps({"info": {"features": FEATURES}})}
    schema = pa.schema({"images": pa.list_(kind), "row": pa.int64()}, metadata)
    table = pa.table({"images": rows, "row": range(len(rows))}, schema)
    pq.write_table(table, path, row_group_size=group)
    return str(path)


def tar(path: Path, rows: Sequence[Sequence[bytes]]) -> str:
    with ShardWriter(str(path / "s-%02d.tar"), max_count=4) as shards:
        for row, images in enumerate(rows):
            members = {f"{item}.png": image for item, image in enumerate(images)}
            shards.write({"__key__": f"{row:03d}", "cls": row, **members})
    return str(path / "s-*.tar")


@pytest.fixture(params=["structs", "bytes", "tar"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Opens the same samples, stored in one way or another."""
    columns: Any = {"images": "images", "row": "row"}
    if request.param == "structs":
        items = [[{"bytes": image, "path": None} for image in images] for images in IMAGES]
        url = parquet(tmp_path / "s.parquet", items)
    elif request.param == "bytes":
        url = parquet(tmp_path / "s.parquet", IMAGES, pa.binary())
    else:
        url, columns = tar(tmp_path, IMAGES), {"images": "*.png", "row": "cls"}
    return lambda image, **more: ShardedDataset(url, columns=columns, decode={"images": image}, **more)


def plain(row: int, image: Image) -> list[torch.Tensor]:
    """The images of a sample by the plain loop."""
    draws = [uniform(SEED, EPOCH, np.array([row]), DRAWS, np.array([item])) for item in range(COUNTS[row])]
    return [
        torch.from_numpy(decode_image(image, data, draw))
        for data, draw in zip(IMAGES[row], draws, strict=True)
    ]


def test_a_batch_is_the_images_of_the_plain_loop(opened: Any) -> None:
    rows = list[int]()
    with DataLoader(opened(DRAWN), 3, shuffle=True, seed=SEED) as loader:
        for batch in loader:
            images = batch["images"]
            assert isinstance(images, Ragged)
            assert images.values.shape[1:] == (3, 12, 12)
            own = batch["row"].tolist()
            assert images.lengths.tolist() == [COUNTS[row] for row in own]
            expected = [image for row in own for image in plain(row, DRAWN)]
            assert len(images.values) == len(expected)
            assert all(map(torch.equal, images.values, expected))
            rows += own
    assert sorted(rows) == list(range(len(COUNTS)))


def test_images_without_a_size_are_lists_whatever_they_hold(opened: Any) -> None:
    with DataLoader(opened(Image(flip=0.5)), 4, shuffle=True, seed=SEED) as loader:
        for batch in loader:
            for row, images in zip(batch["row"].tolist(), batch["images"], strict=True):
                assert type(images) is list
                own = plain(row, Image(flip=0.5))
                assert [image.shape for image in images] == [image.shape for image in own]
                assert all(map(torch.equal, images, own))


def test_random_access_gives_the_same_samples(opened: Any) -> None:
    sized, free = opened(DRAWN), opened(Image())
    sized.seed = SEED
    for row, count in enumerate(COUNTS):
        images = sized[row]["images"]
        assert images.shape == (count, 3, 12, 12)
        assert all(map(torch.equal, images, plain(row, DRAWN)))
        assert all(map(torch.equal, free[row]["images"], plain(row, Image())))
        assert len(free[row]["images"]) == count


def test_the_first_image_draws_as_if_it_were_the_only_one() -> None:
    samples = np.arange(5)
    first = uniform(1, 2, samples, DRAWS, np.zeros(5, np.int64))
    np.testing.assert_array_equal(first, uniform(1, 2, samples, DRAWS))
    items = np.array([0, 3, 3, 1, 2])
    drawn = uniform(1, 2, np.zeros(5, np.int64), DRAWS, items)
    assert len(np.unique(drawn)) == 4 * DRAWS
    for most in (1, 6, 200):  # whatever else is drawn at the same time
        again = uniform(1, 2, np.zeros(6, np.int64), DRAWS, np.append(items, most))
        np.testing.assert_array_equal(again[:5], drawn)


@pytest.mark.parametrize("image", [DRAWN, Image()], ids=["sized", "free"])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_image_makes_its_sample_bad_and_its_place_is_named(
    tmp_path: Path, image: Image, workers: int
) -> None:
    rows = [list(images) for images in IMAGES]
    rows[3][7] = b"no image"
    dataset = ShardedDataset(parquet(tmp_path / "s.parquet", rows, pa.binary()), decode={"images": image})
    with (
        DataLoader(dataset, 5, num_workers=workers) as loader,
        pytest.raises(SampleError, match=r"s\.parquet.*'3'.*column 'images': item 7: cannot decode"),
    ):
        list(loader)
    skipping = ShardedDataset(dataset.catalog.urls[0], decode={"images": image}, on_error="skip")
    with DataLoader(skipping, 5, num_workers=workers) as loader:
        batches = list(loader)
    assert [batch["row"].tolist() for batch in batches] == [[0, 1, 2, 4], [5, 6, 7, 8, 9]]
    counts = [[len(images) for images in _lists(batch["images"])] for batch in batches]
    assert counts == [[3, 0, 1, 2], [0, 4, 1, 1, 5]]


def _lists(images: Any) -> list[Any]:
    return list(images.rows()) if isinstance(images, Ragged) else list(images)


def test_lists_that_are_null_or_hold_paths_are_bad_samples_and_null_images_are_left_out(
    tmp_path: Path,
) -> None:
    one = {"bytes": IMAGES[2][0], "path": "a.png"}
    rows = [None, [one, None, one], [one, {"bytes": None, "path": "a.png"}], [None], [one]]
    url = parquet(tmp_path / "s.parquet", rows)
    errors = dict[str | None, str]()

    def skip(error: SampleError) -> bool:
        errors[error.key] = error.reason
        return True

    dataset = ShardedDataset(url, decode={"images": Image(size=4)}, on_error=skip)
    with DataLoader(dataset, 5) as loader:
        (batch,) = loader
    assert batch["row"].tolist() == [1, 3, 4]
    assert batch["images"].lengths.tolist() == [2, 0, 1]
    assert "lacks this column" in errors["0"]
    assert "only the path of a file is stored" in errors["2"]
    assert "push_to_hub" in errors["2"]


def test_a_batch_without_any_image_has_none(tmp_path: Path) -> None:
    url = parquet(tmp_path / "s.parquet", [[], []])
    with DataLoader(ShardedDataset(url, decode={"images": Image(size=4)}), 2) as loader:
        assert [batch["images"].values.shape for batch in loader] == [(0, 3, 4, 4)]
    with DataLoader(ShardedDataset(url), 2) as loader:
        assert [batch["images"] for batch in loader] == [[[], []]]


def test_interleaved_text_comes_as_lists_with_none_where_an_image_stands(tmp_path: Path) -> None:
    image = {"bytes": IMAGES[2][0], "path": None}
    rows = [{"images": [None, image, None], "texts": ["a", None, "b"]}, {"images": [], "texts": []}]
    schema = pa.schema({"images": pa.list_(MEDIA), "texts": pa.list_(pa.string())})
    pq.write_table(pa.Table.from_pylist(rows, schema), tmp_path / "s.parquet")
    with DataLoader(ShardedDataset(str(tmp_path / "s.parquet")), 2) as loader:
        (batch,) = loader
    assert batch["texts"] == [["a", None, "b"], []]
    assert [len(images) for images in batch["images"]] == [1, 0]


def test_other_lists_of_bytes_are_made_what_decode_says_item_by_item(tmp_path: Path) -> None:
    rows = [[b"1", b"22"], [], [b""]]
    schema = pa.schema({"x": pa.list_(pa.binary())})
    pq.write_table(pa.table({"x": rows}, schema), tmp_path / "s.parquet")

    def read(rule: Any) -> Any:
        with DataLoader(ShardedDataset(str(tmp_path / "s.parquet"), decode={"x": rule}), 3) as loader:
            return next(iter(loader))["x"]

    assert read(len) == [[1, 2], [], [0]]
    assert read("text") == [["1", "22"], [], [""]]
    for rule in (None, "auto", "bytes"):
        assert [[item.tolist() for item in items] for items in read(rule)] == [[[49], [50, 50]], [], [[]]]
    with pytest.raises(ValueError, match=r"decode for column 'x' must be None, Image\(\.\.\.\), a function"):
        read("int")


def test_members_of_a_kind_are_lists_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    with ShardWriter(str(tmp_path / "s-%02d.tar")) as shards:
        for row in range(12):
            members = {f"{item}.txt": f"{row}-{item}" for item in range(row)}
            shards.write({"__key__": f"{row:03d}", "cls": row, **members})
    url = str(tmp_path / "s-*.tar")
    for texts in ("*.txt", [f"{item}.txt" for item in range(11)]):
        with DataLoader(ShardedDataset(url, columns={"texts": texts, "row": "cls"}), 12) as loader:
            (batch,) = loader
        assert batch["texts"] == [[f"{row}-{item}" for item in range(row)] for row in range(12)]
    assert ShardedDataset(url, columns={"t": ["3.txt", "1.txt"]})[5]["t"] == ["5-3", "5-1"]
    assert ShardedDataset(url, columns={"t": ["10.*"]})[11]["t"] == ["11-10"]  # a list, though of one
    with pytest.raises(ValueError, match=r"column '\*.wav' does not exist"):
        ShardedDataset(url, columns={"t": "*.wav"})


def test_a_part_is_delivered_when_it_is_named_and_not_else(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"image": pa.array([{"bytes": IMAGES[2][0], "path": "a.png"}], MEDIA)}),
        tmp_path / "s.parquet",
    )
    url = str(tmp_path / "s.parquet")
    assert list(ShardedDataset(url)[0]) == ["image"]
    assert ShardedDataset(url)[0]["image"].shape == plain(2, Image())[0].shape
    sample = ShardedDataset(url, columns=["image.path", "image.bytes"])[0]
    assert sample["image.path"] == "a.png"
    assert sample["image.bytes"].numpy().tobytes() == IMAGES[2][0]
    with pytest.raises(ValueError, match=r"'image.bytes', a part of column 'image'"):
        ShardedDataset(url, decode={"image.bytes": Image()})


def test_rows_of_images_are_kept_joined_and_padded_as_those_of_numbers() -> None:
    images = Ragged(torch.arange(24).reshape(6, 2, 2), torch.tensor([0, 1, 1, 4, 6]))
    assert [len(row) for row in images.rows()] == [1, 0, 3, 2]
    assert [len(images.row(i)) for i in range(-4, 4)] == [1, 0, 3, 2] * 2
    for beyond in (-5, 4):
        with pytest.raises(IndexError):
            images.row(beyond)
    kept = drop_rows({"x": images}, np.array([1, 3]))["x"]
    assert torch.equal(kept.values, images.values[4:])
    assert kept.offsets.tolist() == [0, 0, 2]
    with torch.device("meta"):  # what says no device would lie elsewhere, as host memory does from a GPU
        padded = images.padded(-1)
    assert padded.shape == (4, 3, 2, 2)
    assert torch.equal(padded[2], images.values[1:4])
    assert (padded[1] == -1).all()
    joined = Ragged.joined([images, kept])
    assert joined.lengths.tolist() == [1, 0, 3, 2, 0, 2]


@pytest.mark.here  # `peak_bytes` counts batches in use, too; processes give some together
def test_memory_stays_within_its_limit_where_lists_decode_to_many_times_their_bytes(tmp_path: Path) -> None:
    url = parquet(tmp_path / "s.parquet", [IMAGES[6]] * 200, pa.binary(), group=100)
    limit = 24 << 20  # a batch takes 4 MB
    dataset = ShardedDataset(url, decode={"images": Image(size=100)})
    with DataLoader(dataset, 32, memory_limit=limit) as loader:
        for batch in loader:
            del batch
        assert loader.stats().memory.peak_bytes <= limit


def test_bytes_that_a_catalog_calls_lists_are_an_error_and_not_read_as_such(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": pa.array([b"\xff" * 64])}), tmp_path / "s.parquet")
    catalog = ShardedDataset(str(tmp_path / "s.parquet")).catalog
    said = replace(catalog, schemas=[{"x": replace(catalog.schema["x"], kind="bytes_list")}])
    with pytest.raises(CorruptShardError, match="column 'x' is not what the catalog says"):
        ShardedDataset(str(tmp_path / "s.parquet"), catalog=said)[0]
    url = tar(tmp_path, [[png(1)]])
    catalog = ShardedDataset(url).catalog
    lists = {name: replace(spec, kind="bytes_list") for name, spec in catalog.schema.items()}
    replace(catalog, schemas=[lists]).save(str(tmp_path / "s.catalog"))
    with pytest.raises(CorruptShardError, match="format 'tar' has no lists of bytes"):
        ShardedDataset(str(tmp_path / "s.catalog"))
