"""JPEGs that libjpeg merely warns about: what is delivered, counted and warned of, and what is an error."""

from __future__ import annotations

import io
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets_kit import write_tar
from loader_kit import num_leased_after_a_loop

from dataflow import DataLoader, ShardedDataset
from dataflow.decode.image import Image, decode_image
from dataflow.processes import parts
from sharding.errors import SampleError

LEFT, NO_END = "leftover bytes before the end mark", "no end mark"


pytestmark = pytest.mark.usefixtures("own_cache")


def jpeg(mode: str = "RGB", *, side: int = 64, **options: Any) -> bytes:
    levels = np.linspace(0, 200, side)[None, :, None] + 40 * np.random.default_rng(0).random((side, side, 3))
    out = io.BytesIO()
    PIL.Image.fromarray(levels.astype(np.uint8)).convert(mode).save(out, "JPEG", **options)
    return out.getvalue()


def leftover(data: bytes) -> bytes:
    return data[:-2] + bytes(range(1, 40)) + data[-2:]


def endless(data: bytes) -> bytes:
    return data[:-2]


def remarks_on(spec: Image, data: bytes) -> tuple[np.ndarray[Any, Any], list[str]]:
    remarks: list[str] = []
    draws = np.full((1, 24), 0.5) if spec.random else None
    return decode_image(spec, data, draws, remark=lambda _, text: remarks.append(text)), remarks


SPECS = [
    Image(),
    Image(mode="L"),
    Image(size=8),  # at an eighth of the scale
    Image(size=16, crop="random_resized", antialias=True),
    Image(size=16, crop="center", dct="exact"),
]


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize(
    "data", [jpeg(), jpeg("L"), jpeg(progressive=True), jpeg(quality=95, subsampling=0)], ids=range(4)
)
def test_leftover_bytes_and_a_missing_end_mark_change_no_pixel(spec: Image, data: bytes) -> None:
    whole, nothing = remarks_on(spec, data)
    assert nothing == []
    for odd, kind in ((leftover(data), LEFT), (endless(data), NO_END)):
        pixels, remarks = remarks_on(spec, odd)
        np.testing.assert_array_equal(pixels, whole)
        assert remarks == [kind]


@pytest.mark.parametrize("odd", [leftover, endless])
def test_what_is_delivered_by_default_is_refused_if_strict_and_taken_in_silence_if_not(odd: Any) -> None:
    data = odd(jpeg())
    told = r"cannot decode the image: .*; Image\(strict=False\) delivers what can be made of it"
    with pytest.raises(SampleError, match=told):
        decode_image(Image(strict=True), data)
    whole, remarks = remarks_on(Image(strict=False), data)
    np.testing.assert_array_equal(whole, decode_image(Image(), jpeg()))
    assert remarks == []


def test_bytes_behind_the_end_mark_are_nothing_odd() -> None:
    for data in (jpeg("L"), jpeg("CMYK"), jpeg(progressive=True)):
        whole, remarks = remarks_on(Image(), data + b"trailing")
        np.testing.assert_array_equal(whole, decode_image(Image(), data))
        assert remarks == []


def damaged() -> dict[str, bytes]:
    data = jpeg(restart_marker_rows=1)
    restart = data.index(b"\xff\xd1")
    return {
        "half": data[: len(data) // 2],
        "half with an end mark": data[: len(data) // 2] + b"\xff\xd9",
        "restart": data[: restart + 1] + b"\xd3" + data[restart + 2 :],
        "restart and leftover": leftover(data[: restart + 1] + b"\xd3" + data[restart + 2 :]),
    }


@pytest.mark.parametrize("what", damaged())
def test_any_other_warning_is_an_error_that_names_what_delivers_it(what: str) -> None:
    with pytest.raises(SampleError, match=r"Image\(strict=False\) delivers what can be made of it"):
        decode_image(Image(), damaged()[what])
    assert decode_image(Image(strict=False), damaged()[what]).shape == (3, 64, 64)


def test_what_no_setting_delivers_names_none() -> None:
    data = jpeg()
    version = data.index(b"JFIF\0") + 5
    for bad in (data[:200], data[:version] + b"\x03" + leftover(data)[version + 1 :]):
        with pytest.raises(SampleError) as caught:
            decode_image(Image(), bad)
        assert "strict" not in str(caught.value)


def images() -> list[bytes]:
    """12, of which 3 have bytes left over and 2 no end mark."""
    plain = [jpeg(side=16 + i) for i in range(12)]
    return [leftover(d) if i in (3, 4, 9) else endless(d) if i in (5, 11) else d for i, d in enumerate(plain)]


def made(folder: Path, form: str) -> ShardedDataset[Any]:
    if form == "parquet":
        pq.write_table(pa.table({"image": images()}), folder / "x.parquet", row_group_size=5)
        return ShardedDataset(str(folder / "x.parquet"), decode={"image": Image(size=8)})
    if form == "lists":
        pairs = [images()[i : i + 2] for i in range(0, 12, 2)]
        pq.write_table(pa.table({"image": pairs}), folder / "x.parquet", row_group_size=2)
        return ShardedDataset(str(folder / "x.parquet"), decode={"image": "image"})
    if form == "ragged":
        pairs = [images()[i : i + 2] for i in range(0, 12, 2)]
        pq.write_table(pa.table({"image": pairs}), folder / "x.parquet", row_group_size=2)
        return ShardedDataset(str(folder / "x.parquet"), decode={"image": Image(size=8)})
    write_tar(folder / "x.tar", [(f"{i:02d}.jpg", data) for i, data in enumerate(images())])
    decode = {"jpg": Image(size=8)} if form == "sized" else "auto"
    return ShardedDataset(str(folder / "x.tar"), decode=decode, block_bytes=3000)


@pytest.mark.parametrize("form", ["sized", "free", "parquet", "ragged", "lists"])
def test_odd_images_are_counted_by_kind_and_warned_of_once(tmp_path: Path, form: str) -> None:
    dataset = made(tmp_path, form)
    with DataLoader(dataset, 2, num_workers=2, workers="thread") as loader:
        with pytest.warns(UserWarning, match=r"x\.(tar|parquet)") as caught:
            assert sum(len(next(iter(batch.values()))) for batch in loader) == len(dataset)
        assert loader.stats().image_warnings == {LEFT: 3, NO_END: 2}
        texts = [str(one.message) for one in caught]
        assert sorted(kind for text in texts for kind in (LEFT, NO_END) if kind in text) == [LEFT, NO_END]
        assert all("sample '" in text and "Image(strict=True)" in text for text in texts)
        list(loader)  # without a warning, which would be an error
        assert loader.stats().image_warnings == {LEFT: 6, NO_END: 4}


def test_processes_count_and_tell_of_odd_images_too(tmp_path: Path) -> None:
    dataset = made(tmp_path, "sized")
    with DataLoader(dataset, 2, num_workers=1) as loader:
        with pytest.warns(UserWarning, match="sample '0") as caught:
            list(loader)
        assert loader.stats().image_warnings == {LEFT: 3, NO_END: 2}
        texts = [str(one.message) for one in caught if one.category is UserWarning]  # Python 3.13 has others
        assert sorted("sample '03'" in text for text in texts) == [False, True]


@pytest.fixture
def _every_sample_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "SAMPLE_S", 0.0)
    monkeypatch.setattr(parts, "_MOST_RATE", math.inf)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_every_sample_is_slow")
@pytest.mark.parametrize(("form", "most"), [("free", 2), ("sized", 1)])
def test_processes_share_batches_but_those_whose_images_are_decoded_at_once(
    tmp_path: Path, form: str, most: int
) -> None:
    made(tmp_path, form)
    decode = {"jpg": Image(size=8)} if form == "sized" else "auto"
    dataset = ShardedDataset(str(tmp_path / "x.tar"), decode=decode, transform=lambda sample: os.getpid())
    with DataLoader(dataset, 3, num_workers=2) as loader:
        assert max(len(set(batch.tolist())) for _ in range(8) for batch in loader) == most


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_every_sample_is_slow")
def test_odd_images_of_batches_that_processes_share_are_counted_once(tmp_path: Path) -> None:
    made(tmp_path, "free")
    dataset = ShardedDataset(str(tmp_path / "x.tar"), decode="auto", transform=lambda sample: len(sample))
    with DataLoader(dataset, 3, num_workers=2) as loader:
        for _ in range(3):
            list(loader)
        assert loader.stats().image_warnings == {LEFT: 9, NO_END: 6}


def test_random_access_warns_once(tmp_path: Path) -> None:
    dataset = made(tmp_path, "free")
    with pytest.warns(UserWarning, match=f"sample '03'.*{LEFT}") as caught:
        assert [dataset[i]["jpg"].shape[1] for i in (3, 4, 0)] == [19, 20, 16]
    assert len(caught) == 1


def test_strict_images_end_the_epoch_or_are_skipped(tmp_path: Path) -> None:
    made(tmp_path, "sized")
    decode = {"jpg": Image(size=8, strict=True)}
    with pytest.raises(SampleError, match=r"sample '03'.*strict=False"):
        list(DataLoader(ShardedDataset(str(tmp_path / "x.tar"), decode=decode), 4, num_workers=0))
    dataset = ShardedDataset(str(tmp_path / "x.tar"), decode=decode, on_error="skip")
    with DataLoader(dataset, 4, num_workers=0) as loader:
        list(loader)
        assert (loader.stats().skipped_samples, loader.stats().image_warnings) == (5, {})


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 2, "workers": "thread"}])
def test_images_that_are_left_out_keep_no_batch_until_garbage_is_collected(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    good = jpeg()
    write_tar(tmp_path / "a.tar", [(f"{n:02}.jpg", good if n % 7 else b"\xff\xd8 bad") for n in range(64)])
    dataset = ShardedDataset(str(tmp_path / "a.tar"), decode={"jpg": Image(size=32)}, on_error="skip")
    assert num_leased_after_a_loop(dataset, **options) <= 2  # what is read ahead
