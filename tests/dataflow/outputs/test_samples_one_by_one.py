"""Values without a fixed size before a transform: decode, transform, next; and samples that are too large."""

from __future__ import annotations

import io
import tracemalloc
import wave
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import write_tar
from torch import Tensor

from dataflow import (
    Audio,
    DataLoader,
    Image,
    MemoryLimitError,
    SampleTooLargeError,
    ShardedDataset,
    Video,
)

cv2 = pytest.importorskip("cv2")
Sample = dict[str, Any]
TIMEOUT_S = 60


def png(height: int, width: int, value: int = 7) -> bytes:
    return bytes(cv2.imencode(".png", np.full((height, width, 3), value, np.uint8))[1])


def tar_of(folder: Path, *samples: dict[str, bytes]) -> Path:
    members = [(f"{i:03d}.{name}", data) for i, one in enumerate(samples) for name, data in one.items()]
    write_tar(folder / "s.tar", members)
    return folder / "s.tar"


class Decoded:
    """What a function of bytes makes; counts those that are alive."""

    alive: ClassVar[weakref.WeakSet[Decoded]] = weakref.WeakSet()

    def __init__(self, data: bytes) -> None:
        self.data = data
        Decoded.alive.add(self)


def counted(sample: Sample) -> Sample:
    return {"alive": len(Decoded.alive)}


def tensors_of(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else [one for item in value for one in tensors_of(item)]


class CountTensors:
    """A transform that tells how many of the tensors that it was given are alive."""

    def __init__(self) -> None:
        self.alive: list[weakref.ref[Tensor]] = []

    def __call__(self, sample: Sample) -> Sample:
        self.alive.extend(weakref.ref(one) for one in tensors_of(sample["x"]))
        return {"alive": sum(one() is not None for one in self.alive)}


@pytest.mark.here
@pytest.mark.parametrize(
    ("columns", "decode", "most"),
    [
        ({"x": "0.png"}, Image(), 1),
        ({"x": "*.png"}, Image(), 2),
    ],
    ids=["image", "images"],
)
@pytest.mark.parametrize("collate", [None, list])
def test_images_of_one_sample_alone_are_there_while_it_is_transformed(
    tmp_path: Path, columns: Any, decode: Any, most: int, collate: Callable[..., Any] | None
) -> None:
    url = tar_of(tmp_path, *({"0.png": png(20 + i, 30), "1.png": png(30, 20 + i)} for i in range(6)))
    dataset = ShardedDataset(url, columns=columns, decode={"x": decode}, transform=CountTensors())
    with DataLoader(dataset, 3, num_workers=0, collate_fn=collate) as loader:
        found = [one for batch in loader for one in (batch if collate else batch["alive"].tolist())]
    assert {one["alive"] if collate else one for one in found} == {most}


@pytest.mark.here
@pytest.mark.parametrize("kind", ["tar", "lists", "parquet"])
def test_objects_of_one_sample_alone_are_there_while_it_is_transformed(tmp_path: Path, kind: str) -> None:
    most = 2 if kind == "lists" else 1
    if kind == "parquet":
        pq.write_table(pa.table({"x": [b"a" * i for i in range(6)]}), tmp_path / "s.parquet")
        dataset = ShardedDataset(tmp_path / "s.parquet", decode={"x": Decoded}, transform=counted)
    else:
        url = tar_of(tmp_path, *({"0.bin": b"a", "1.bin": b"b"} for _ in range(6)))
        columns = {"x": "*.bin" if kind == "lists" else "0.bin"}
        dataset = ShardedDataset(url, columns=columns, decode={"x": Decoded}, transform=counted)
    Decoded.alive.clear()
    with DataLoader(dataset, 3, num_workers=0) as loader:
        assert {one for batch in loader for one in batch["alive"].tolist()} == {most}


class Together:
    """A transform with a batch form."""

    def __call__(self, sample: Sample) -> Sample:
        return counted(sample)

    def batch(self, samples: list[Sample]) -> list[Sample]:
        return [counted(one) for one in samples]


@pytest.mark.here
def test_a_batch_form_is_given_the_samples_of_a_batch_together(tmp_path: Path) -> None:
    url = tar_of(tmp_path, *({"bin": b"a"} for _ in range(6)))
    Decoded.alive.clear()
    dataset = ShardedDataset(url, decode={"bin": Decoded}, transform=Together())
    with DataLoader(dataset, 3, num_workers=0) as loader:
        assert {one for batch in loader for one in batch["alive"].tolist()} == {3}


def crop(sample: Sample) -> Sample:
    corner = sample["png"][:, :4, :4]
    return {"view": corner, "array": corner.numpy(), "nested": [{"x": torch.from_numpy(corner.numpy())}]}


@pytest.mark.here
def test_a_result_that_views_much_more_than_its_own_bytes_is_copied(tmp_path: Path) -> None:
    url = tar_of(tmp_path, *({"png": png(400, 300, value)} for value in (3, 4)))
    with DataLoader(
        ShardedDataset(url, transform=crop), 2, num_workers=0, collate_fn=lambda samples: samples
    ) as loader:
        (batch,) = loader
    for value, sample in zip((3, 4), batch, strict=True):
        parts = [sample["view"], torch.from_numpy(sample["array"]), sample["nested"][0]["x"]]
        assert all(part.untyped_storage().nbytes() == 48 for part in parts)
        assert all(torch.equal(part, torch.full((3, 4, 4), value, dtype=torch.uint8)) for part in parts)


def as_it_is(sample: Sample) -> Sample:
    return sample


@pytest.mark.here
def test_a_result_that_is_most_of_what_it_views_is_not(tmp_path: Path) -> None:
    seen: list[int] = []

    def half(sample: Sample) -> Sample:
        seen.append(sample["png"].data_ptr())
        return {"x": sample["png"][:, :300]}

    dataset = ShardedDataset(tar_of(tmp_path, {"png": png(400, 300)}), transform=half)
    with DataLoader(dataset, 1, num_workers=0, collate_fn=lambda samples: samples) as loader:
        ((sample,),) = loader
    assert [sample["x"].data_ptr()] == seen


@pytest.mark.parametrize("options", [{"num_workers": 0}, {"num_workers": 1, "workers": "thread"}])
def test_bad_samples_are_left_out_in_order_whether_decoding_or_the_transform_fails(
    tmp_path: Path, options: Any
) -> None:
    def picky(sample: Sample) -> Sample:
        if sample["cls"] == 4:
            raise ValueError("four")
        return {"cls": sample["cls"], "mean": sample["png"].float().mean()}

    samples = [{"png": b"no image" if i in (1, 5) else png(8, 9, i), "cls": b"%d" % i} for i in range(8)]
    dataset = ShardedDataset(tar_of(tmp_path, *samples), transform=picky, on_error="skip")
    with DataLoader(dataset, 8, **options) as loader:
        (batch,) = loader
        stats = loader.stats()
    assert batch["cls"].tolist() == [0, 2, 3, 6, 7]
    assert batch["mean"].tolist() == [0, 2, 3, 6, 7]
    assert stats.skipped_samples == 3
    assert [any(key in text for text in stats.skipped) for key in ("'001'", "'004'", "'005'")] == [True] * 3


# ---- samples too large ------------------------------------------------------------------------------------


@pytest.mark.parametrize("transform", [None, as_it_is])
@pytest.mark.parametrize("columns", [None, {"x": "*.png"}], ids=["image", "images"])
def test_an_image_that_decoded_cannot_fit_is_an_error_that_names_the_sample(
    tmp_path: Path, transform: Any, columns: Any
) -> None:
    url = tar_of(tmp_path, {"0.png": png(8, 8)}, {"0.png": png(700, 800)})
    loader = DataLoader(
        ShardedDataset(url, columns=columns, transform=transform), 1, memory_limit=1_000_000, num_workers=0
    )
    batches = iter(loader)
    next(batches)
    told = r"'001'.*decoded, it takes 1,680,000 bytes or more, and memory_limit=1,000,000"
    with pytest.raises(SampleTooLargeError, match=told):
        next(batches)
    loader.close()


@pytest.mark.parametrize("transform", [None, as_it_is])
def test_such_samples_are_left_out_by_skip_and_batches_larger_than_the_limit_run(
    tmp_path: Path, transform: Any
) -> None:
    samples = [{"png": png(700 if i == 3 else 300, 800, i)} for i in range(8)]
    dataset = ShardedDataset(
        tar_of(tmp_path, *samples), decode={"png": Image()}, transform=transform, on_error="skip"
    )
    with DataLoader(dataset, 8, memory_limit=1_000_000, num_workers=1, workers="thread") as loader:
        (batch,) = loader
        assert len(batch["png"]) == 7
        assert loader.stats().skipped_samples == 1


def test_one_builder_process_holds_two_batches_more_than_the_limit_at_most(tmp_path: Path) -> None:
    pq.write_table(pa.table({"y": list(range(200))}), tmp_path / "s.parquet", row_group_size=50)

    def large(sample: Sample) -> Sample:
        return {"x": torch.zeros(250_000)}

    limit, batch_bytes = 10_000_000, 4_000_000
    dataset = ShardedDataset(tmp_path / "s.parquet", transform=large)
    with DataLoader(dataset, 4, memory_limit=limit, num_workers=1, timeout=TIMEOUT_S) as loader:
        assert sum(len(batch["x"]) for batch in loader) == 200
        assert loader.stats().memory.peak_bytes < limit + 2 * batch_bytes + 1_000_000


# ---- hostile sound and video ------------------------------------------------------------------------------


def wav(num_samples: int, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(bytes(2 * num_samples))
    return file.getvalue()


@pytest.mark.parametrize("transform", [None, as_it_is])
@pytest.mark.parametrize(
    ("rate", "rule"),
    [
        (1, Audio(rate=16000)),
        (1, Audio(rate=16000, seconds=0.5, clip="start")),
        (2**31 - 1, Audio(seconds=5, pad="zeros", clip="start")),
    ],
    ids=["all", "clip", "padded"],
)
def test_sound_of_a_hostile_rate_is_refused_before_it_takes_memory(
    tmp_path: Path, transform: Any, rate: int, rule: Audio
) -> None:
    pytest.importorskip("media_kit")
    pq.write_table(pa.table({"x": [wav(32000, 16000), wav(32000, rate)]}), tmp_path / "s.parquet")
    dataset = ShardedDataset(tmp_path / "s.parquet", decode={"x": rule}, transform=transform, on_error="skip")
    tracemalloc.start()
    with DataLoader(dataset, 1, memory_limit="100MB", num_workers=0) as loader:
        assert len(list(loader)) == 1
        (text,) = loader.stats().skipped
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "s.parquet" in text
    assert "memory_limit=100,000,000" in text
    assert peak_bytes < 50_000_000


def test_all_of_a_sound_is_the_same_with_and_without_a_limit() -> None:
    kit = pytest.importorskip("media_kit")
    for kind in ("wav", "flac", "mp3"):
        data = np.frombuffer(kit.sound(16000, kind), np.uint8)
        for rule in (Audio(), Audio(rate=8000), Audio(rate=44100)):
            whole = rule.decode(data, None)
            assert np.array_equal(rule.decode(data, None, most_bytes=whole.nbytes), whole)
            with pytest.raises(MemoryLimitError):
                rule.decode(data, None, most_bytes=whole.nbytes - 4)


def test_a_video_that_decoded_cannot_fit_is_refused_before_its_frames_are_decoded() -> None:
    kit = pytest.importorskip("media_kit")
    data = np.frombuffer(kit.video(30), np.uint8)
    nbytes = 30 * 3 * kit.SIDE**2
    for rule in (Video(clip="start"), Video(fps=kit.FPS, clip="start"), Video(frames=30, clip="start")):
        assert rule.decode(data, None, most_bytes=nbytes).nbytes == nbytes
        with pytest.raises(MemoryLimitError, match=f"takes {nbytes:,} bytes"):
            rule.decode(data, None, most_bytes=nbytes - 1)
