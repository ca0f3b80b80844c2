"""`columns={"image": "jpg|png"}`: the first of several members that a sample of tar has."""

from __future__ import annotations

import io
import tarfile
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets_kit import rows_of, write_tar
from PIL import Image as PILImage

from dataflow import DataLoader, Image, Optional, SampleError, ShardedDataset, Shuffle

BUILDERS: list[dict[str, Any]] = [{}, {"num_workers": 2, "workers": "process"}, {"num_workers": 0}]
FORMATS = {"jpg": "JPEG", "png": "PNG", "webp": "WEBP"}


def endings_of(n: int) -> list[str]:
    """One shard has JPEGs, one PNGs, one either, both, or WebP."""
    if n < 20:
        return ["jpg" if n < 10 else "png"]
    return [["jpg"], ["png"], ["jpg", "png"], ["webp"], ["png", "webp"]][n % 5]


def picture(n: int, ending: str) -> bytes:
    """Which of a sample's pictures it is shows in its brightness."""
    out = io.BytesIO()
    level = n * 5 + list(FORMATS).index(ending)
    PILImage.fromarray(np.full((16, 16, 3), level, np.uint8)).save(out, FORMATS[ending], lossless=True)
    return out.getvalue()


@pytest.fixture(scope="module", params=["tar", "tar.gz"])
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alternatives")
    for shard in range(4):
        members = [
            member
            for n in range(shard * 10, shard * 10 + 10)
            for member in [
                *((f"{n:03d}.{ending}", picture(n, ending)) for ending in endings_of(n)),
                (f"{n:03d}.cls", str(n).encode()),
            ]
        ]
        write_tar(folder / f"{shard}.{request.param}", members)
    return str(folder / f"*.{request.param}")


def plain_loop(pattern: str, names: list[str]) -> dict[int, bytes]:
    """The bytes that a loop over the archives takes: of each sample, the first of the names."""
    samples = dict[str, dict[str, bytes]]()
    for path in sorted(Path(pattern).parent.glob(Path(pattern).name)):
        with tarfile.open(path) as archive:
            for member in archive:
                key, _, ending = member.name.partition(".")
                file = archive.extractfile(member)
                assert file is not None
                samples.setdefault(key, {})[ending] = file.read()
    return {
        int(own["cls"]): next(own[name] for name in names if name in own)
        for own in samples.values()
        if any(name in own for name in names)
    }


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", BUILDERS, ids=str)
@pytest.mark.parametrize("order", ["jpg|png|webp", "webp|png|jpg", "png|jpg|webp|gif"])
def test_batches_are_those_of_a_plain_loop(shards: str, order: str, options: dict[str, Any]) -> None:
    dataset = ShardedDataset(
        shards, columns={"image": order, "cls": "cls"}, decode={"image": None, "cls": "int"}, block_bytes=9000
    )
    wanted = plain_loop(shards, order.split("|"))
    for shuffle in (Shuffle("none"), Shuffle("window"), Shuffle("full")):
        with DataLoader(dataset, 7, shuffle=shuffle, **options) as loader:
            rows = list(chain(*map(rows_of, loader)))
        assert {row["cls"]: bytes(row["image"]) for row in rows} == wanted
        assert len(rows) == len(wanted) == 40


def test_one_image_decoder_serves_all_of_them(shards: str) -> None:
    dataset = ShardedDataset(
        shards,
        columns={"image": "jpg|png|webp", "cls": "cls"},
        decode={"image": Image(size=16), "cls": "int"},
    )
    with DataLoader(dataset, 8, shuffle=True) as loader:
        levels = {
            int(n): float(image.float().mean())
            for batch in loader
            for image, n in zip(batch["image"], batch["cls"], strict=True)
        }
    for n in range(40):
        ending = next(ending for ending in FORMATS if ending in endings_of(n))
        assert abs(levels[n] - picture_level(n, ending)) <= 1.0
        assert abs(float(dataset[n]["image"].float().mean()) - levels[n]) <= 1.0


def picture_level(n: int, ending: str) -> float:
    with PILImage.open(io.BytesIO(picture(n, ending))) as image:
        return float(np.asarray(image.convert("RGB")).mean())


def test_the_decoder_is_known_without_saying_so_where_all_are_alike(shards: str) -> None:
    assert ShardedDataset(shards, columns={"image": "jpg|png|webp"})[5]["image"].shape == (3, 16, 16)
    with pytest.raises(ValueError, match=r"alternatives are decoded alike, got jpg \(image\), cls \(int\)"):
        ShardedDataset(shards, columns={"image": "jpg|cls"})


def test_a_sample_with_none_of_them_is_an_error_before_anything_is_read(shards: str) -> None:
    dataset = ShardedDataset(shards, columns={"image": "jpg|png", "cls": "cls"})
    with pytest.raises(SampleError, match=r"sample '3': .* none of the members jpg, png, which") as caught:
        DataLoader(dataset)
    assert "dataset.filter(field('jpg').is_valid() | field('png').is_valid())" in str(caught.value)
    assert str(caught.value.shard).endswith(("2.tar", "2.tar.gz"))
    DataLoader(dataset.take(23))
    with pytest.raises(SampleError, match="sample '023': column 'image'"):
        dataset[23]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("options", BUILDERS, ids=str)
def test_a_sample_with_none_of_them_may_be_declared_or_skipped(shards: str, options: dict[str, Any]) -> None:
    columns, have = {"image": "jpg|png", "cls": "cls"}, plain_loop(shards, ["jpg", "png"])
    declared = ShardedDataset(
        shards, columns=columns, decode={"image": Optional(Image(size=16), mask=True), "cls": "int"}
    )
    with DataLoader(declared, 8, **options) as loader:
        masks = {int(n): bool(m) for b in loader for n, m in zip(b["cls"], b["image_mask"], strict=True)}
    assert masks == {n: n in have for n in range(40)}
    skipping = ShardedDataset(shards, columns=columns, on_error="skip")
    with DataLoader(skipping, 8, **options) as loader:
        assert sorted(int(n) for batch in loader for n in batch["cls"]) == sorted(have)


def test_a_sample_that_lacks_an_image_is_told_of_the_others(shards: str) -> None:
    for columns, name in (({"image": "jpg"}, "image"), ({"picture": "jpg"}, "picture"), (["jpg"], "image")):
        dataset = ShardedDataset(shards, columns=columns)
        offer = f'columns={{"{name}": "jpg|png|webp"}} takes the first of these members that a sample has'
        with pytest.raises(SampleError) as caught:
            DataLoader(dataset)
        assert offer in str(caught.value)
        with pytest.raises(SampleError) as caught:
            dataset[12]
        assert offer in str(caught.value)


@pytest.mark.reads_here
def test_a_join_takes_alternatives_of_either_side(shards: str, tmp_path: Path) -> None:
    captions = tmp_path / "captions.parquet"
    pq.write_table(
        pa.table({"id": [f"{n:03d}" for n in range(40)], "caption": list(map(str, range(40)))}), captions
    )
    columns = {"image": "jpg|png|webp", "cls": "cls"}
    images = ShardedDataset(shards, columns=columns, decode={"image": None, "cls": "int"})
    texts = ShardedDataset(str(captions))
    wanted = plain_loop(shards, ["jpg", "png", "webp"])
    for joined in (
        images.join(texts, on=("__key__", "id"), amplification=50),
        texts.join(images, on=("id", "__key__"), amplification=50),
    ):
        with DataLoader(joined, 8, shuffle=Shuffle("none")) as loader:
            rows = list(chain(*map(rows_of, loader)))
        assert {int(row["caption"]): bytes(row["image"]) for row in rows} == wanted


def test_a_list_may_have_alternatives_for_each_item(tmp_path: Path) -> None:
    files = [
        ("a.0.x", b"one"),
        ("a.1.y", b"two"),
        ("b.0.y", b"three"),
        ("b.1.x", b"four"),
        ("b.1.y", b"five"),
    ]
    write_tar(tmp_path / "x.tar", files)
    dataset = ShardedDataset(str(tmp_path / "x.tar"), columns={"parts": ["0.x|0.y", "1.x|1.y"]})
    rows = [[bytes(part) for part in dataset[i]["parts"]] for i in range(2)]
    assert rows == [[b"one", b"two"], [b"three", b"four"]]


def test_what_is_no_alternative_is_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "x.tar", [("a.jpg", b""), ("a.p|q", b"1")])
    path = str(tmp_path / "x.tar")
    assert bytes(ShardedDataset(path, columns={"x": "p|q"})[0]["x"].tolist()) == b"1"  # it is called so
    for text in ("jpg|*", "jpg|jpg", "jpg|__key__"):
        with pytest.raises(ValueError, match="alternatives are different names"):
            ShardedDataset(path, columns={"x": text})
    with pytest.raises(ValueError, match=r"no sample has a member of 'gif\|webp'; the dataset has: jpg"):
        ShardedDataset(path, columns={"x": "gif|webp"})
    pq.write_table(pa.table({"a": [b"1"], "b/c": [b"2"]}), tmp_path / "x.parquet")
    with pytest.raises(
        ValueError, match="alternatives are for members of tar files: in parquet files, write one"
    ):
        ShardedDataset(str(tmp_path / "x.parquet"), columns={"x": "a|b/c"})
    with pytest.raises(ValueError, match="column 'a/b' does not exist"):
        ShardedDataset(str(tmp_path / "x.parquet"), columns={"x": "a/b"})
    assert bytes(ShardedDataset(str(tmp_path / "x.parquet"), columns=["b/c"])[0]["b/c"].tolist()) == b"2"
