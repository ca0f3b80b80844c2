"""Columns of sound and video in batches: types, draws, damage, and what is read of remote shards."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from datasets_kit import write_tar
from http_kit import RangeServer, serving, slowstore
from media_kit import first_sample, numbers_of, sound, video

from dataflow import Audio, DataLoader, MissingMediaSupportError, Optional, SampleError, ShardedDataset, Video

CLIP = Video(frames=4, fps=15, size=64)


@pytest.fixture
def tar(tmp_path: Path) -> Path:
    members = []
    for i in range(8):
        members += [
            (f"{i}.mp4", video(60, first=100 * i)),
            (f"{i}.flac", sound(16000, "flac")),
            (f"{i}.cls", b"%d" % i),
        ]
    write_tar(tmp_path / "clips.tar", members)
    return tmp_path / "clips.tar"


def clips(source: Any, **settings: Any) -> list[tuple[int, list[int], int]]:
    """Of every sample delivered: its label, its frames, its first sample of sound."""
    more = {"on_error": settings.pop("on_error")} if "on_error" in settings else {}
    dataset = ShardedDataset(source, decode={"mp4": CLIP, "flac": Audio(rate=16000, seconds=0.25)}, **more)
    found = []
    with DataLoader(dataset, shuffle=True, seed=3, **settings) as loader:
        for batch in loader:
            rows = zip(batch["cls"].tolist(), batch["mp4"], batch["flac"], strict=True)
            found += [(label, numbers_of(clip), first_sample(heard)) for label, clip, heard in rows]
    return found


def test_clips_of_one_size_are_one_tensor_a_batch(tar: Path) -> None:
    dataset = ShardedDataset(tar, decode={"mp4": CLIP, "flac": Audio(rate=16000, seconds=0.25)})
    (batch,) = DataLoader(dataset, batch_size=8)
    assert (batch["mp4"].dtype, batch["mp4"].shape) == (torch.uint8, (8, 4, 3, 64, 64))
    assert (batch["flac"].dtype, batch["flac"].shape) == (torch.float32, (8, 1, 4000))


def test_clips_of_their_own_sizes_are_a_list_however_alike_they_are(tar: Path) -> None:
    dataset = ShardedDataset(tar, decode={"mp4": Video(frames=4), "flac": Audio()}, columns=["mp4", "flac"])
    (batch,) = DataLoader(dataset, batch_size=8)
    assert [type(batch["mp4"]), type(batch["flac"])] == [list, list]
    assert {clip.shape for clip in batch["mp4"]} == {(4, 3, 64, 64)}


def test_without_a_rule_they_stay_bytes(tar: Path) -> None:
    (batch,) = DataLoader(ShardedDataset(tar, columns=["mp4", "flac"]), batch_size=8)
    assert batch["mp4"].row(0).numpy().tobytes() == video(60)


def test_clips_depend_on_seed_epoch_and_sample_alone(tar: Path) -> None:
    by_label = {label: rest for label, *rest in clips(tar, batch_size=2)}
    assert by_label == {label: rest for label, *rest in clips(tar, batch_size=8)}
    assert len({frames[0] % 100 for frames, _ in by_label.values()}) > 1
    dataset = ShardedDataset(tar, decode={"mp4": CLIP})
    with DataLoader(dataset, batch_size=8) as loader:
        first, second = ([numbers_of(clip) for clip in batch["mp4"]] for _ in range(2) for batch in loader)
    assert first != second


def test_builder_processes_give_the_same_clips(tar: Path) -> None:
    assert clips(tar, batch_size=4, num_workers=1) == clips(tar, batch_size=4)


def test_single_samples_are_decoded_by_the_same_rule(tar: Path) -> None:
    sample = ShardedDataset(tar, decode={"mp4": Video(frames=4, clip="start", size=32)})[3]
    assert numbers_of(sample["mp4"]) == [300, 301, 302, 303]


def test_parquet_columns_of_bytes_are_decoded(tmp_path: Path) -> None:
    table = pa.table({"clip": [video(60, first=100 * i) for i in range(4)], "n": range(4)})
    pq.write_table(table, tmp_path / "clips.parquet")
    dataset = ShardedDataset(
        tmp_path / "clips.parquet", decode={"clip": Video(frames=2, clip="start", size=64)}
    )
    (batch,) = DataLoader(dataset, batch_size=4)
    assert [numbers_of(clip) for clip in batch["clip"]] == [[100 * i, 100 * i + 1] for i in range(4)]


def test_long_videos_give_the_same_clips_when_only_parts_are_read(
    tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = clips(tar, batch_size=4)
    monkeypatch.setattr("dataflow.staging.reading._LEAST_CUT_BYTES", 0)
    assert clips(tar, batch_size=4) == whole


@pytest.fixture
def long_tar(tmp_path: Path) -> Path:
    """Four videos of more than a MiB; and labels, which are read whole."""
    long = video(600, noise=60, b="5M")
    assert len(long) > 1 << 20
    members = [(f"{i}.{name}", data) for i in range(4) for name, data in (("mp4", long), ("cls", b"%d" % i))]
    write_tar(tmp_path / "long.tar", members)
    return tmp_path / "long.tar"


def test_of_long_videos_in_a_remote_tar_only_the_bytes_of_the_clips_are_fetched(long_tar: Path) -> None:
    with serving(RangeServer(long_tar.parent)) as server:
        dataset = ShardedDataset(f"{server.url}/long.tar", decode={"mp4": CLIP})
        server.asked.clear()
        with DataLoader(dataset, batch_size=2, shuffle=True, seed=1) as loader:
            got = [numbers_of(clip) for batch in loader for clip in batch["mp4"]]
        fetched = sum(asked.nbytes for asked in server.asked)
    assert all(clip == [*range(clip[0], clip[0] + 8, 2)] for clip in got)
    assert fetched < long_tar.stat().st_size // 4


def test_no_clip_is_lost_where_one_in_twenty_requests_fails(long_tar: Path) -> None:
    with slowstore(long_tar.parent, "--error-rate", "0.05", "--reset-rate", "0.05", "--seed", "4") as url:
        dataset = ShardedDataset(f"{url}/long.tar", decode={"mp4": CLIP})
        with DataLoader(dataset, batch_size=2, shuffle=True, seed=1) as loader:
            found = {
                label: numbers_of(clip)
                for _ in range(5)
                for batch in loader
                for label, clip in zip(batch["cls"].tolist(), batch["mp4"], strict=True)
            }
    assert sorted(found) == [0, 1, 2, 3]
    assert all(clip == [*range(clip[0], clip[0] + 8, 2)] for clip in found.values())


# ---- damage --------------------------------------------------------------------------------------------


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    good = video(60)
    videos = [good, good[: len(good) // 2], b"", video(2), b"not a video" * 99, good]
    write_tar(tmp_path / "damaged.tar", [(f"{i}.mp4", data) for i, data in enumerate(videos)])
    return tmp_path / "damaged.tar"


@pytest.mark.parametrize("cut_bytes", [1 << 30, -1], ids=["whole", "parts"])
def test_damaged_short_and_empty_videos_are_left_out(
    damaged: Path, cut_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.staging.reading._LEAST_CUT_BYTES", cut_bytes)
    dataset = ShardedDataset(damaged, columns=["__key__", "mp4"], decode={"mp4": CLIP}, on_error="skip")
    with DataLoader(dataset, batch_size=6) as loader:
        (batch,) = loader
        skipped = len(loader.stats().skipped)
    assert batch["__key__"] == ["0", "5"]
    assert batch["mp4"].shape == (2, 4, 3, 64, 64)
    assert skipped == 4


def test_lists_stay_lists_when_samples_are_left_out(damaged: Path) -> None:
    dataset = ShardedDataset(damaged, decode={"mp4": Video(frames=4)}, on_error="skip")
    (batch,) = DataLoader(dataset, batch_size=6)
    assert (type(batch["mp4"]), len(batch["mp4"])) == (list, 2)


def test_the_error_names_shard_key_and_column(damaged: Path) -> None:
    dataset = ShardedDataset(damaged, decode={"mp4": CLIP})
    with pytest.raises(SampleError, match=r"damaged\.tar.*sample '1'.*column 'mp4'.*truncated"):
        list(DataLoader(dataset, batch_size=6))
    with pytest.raises(SampleError, match=r"sample '3'.*too short for a clip of 4 frames at 15 a second"):
        dataset[3]


def test_a_codec_that_is_not_built_in_is_named_in_one_line(tmp_path: Path) -> None:
    unknown = video(12).replace(b"mp4v", b"zzzz").replace(b"esds", b"free")
    write_tar(tmp_path / "unknown.tar", [("0.mp4", unknown)])
    with pytest.raises(SampleError, match=r"sample '0'.*cannot decode it.*ffmpeg -codecs") as caught:
        ShardedDataset(tmp_path / "unknown.tar", decode={"mp4": CLIP})[0]
    assert len(str(caught.value).splitlines()) == 1


def test_missing_torchcodec_is_an_error_at_opening(tar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    monkeypatch.delattr("torchcodec.decoders", raising=False)
    with pytest.raises(MissingMediaSupportError, match=r"pip install 'dataflow-loader\[media\]'"):
        ShardedDataset(tar, decode={"mp4": CLIP})


def test_a_torchcodec_that_finds_no_ffmpeg_is_an_error_at_opening(
    tar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 0.17 can be imported all the same: without this, every sample would be a broken one."""
    monkeypatch.setattr("torchcodec.ffmpeg_major_version", None)
    with pytest.raises(MissingMediaSupportError, match=r"no version of FFmpeg is found.*install ffmpeg"):
        ShardedDataset(tar, decode={"mp4": CLIP})


def test_draws_of_sound_are_those_of_its_sample(tar: Path) -> None:
    dataset = ShardedDataset(tar, decode={"flac": Audio(rate=16000, seconds=0.25)}, columns=["flac"])
    firsts = {first_sample(sample["flac"]) for sample in (dataset[i] for i in range(8))}
    assert len(firsts) > 4
    assert np.all([0 <= first <= 12000 for first in firsts])


# ---- which parts are padding ---------------------------------------------------------------------------


@pytest.fixture
def uneven(tmp_path: Path) -> dict[str, Path]:
    """Clips of 3, 4 and 60 frames, 250, 500 and 1,000 ms of sound: as tar and as Parquet."""
    videos = [video(3), video(4, "mkv"), video(60), video(3, "mkv")]
    sounds = [sound(samples, "flac") for samples in (4000, 8000, 16000, 4000)]
    members = [(f"{i}.{kind}", data) for i in range(4) for kind, data in (("v", videos[i]), ("s", sounds[i]))]
    write_tar(tmp_path / "uneven.tar", members)
    pq.write_table(pa.table({"v": videos, "s": sounds}), tmp_path / "uneven.parquet")
    return {"tar": tmp_path / "uneven.tar", "parquet": tmp_path / "uneven.parquet"}


VIDEO_PADS = [[False] * 3 + [True] * 2, [False] * 4 + [True], [False] * 5, [False] * 3 + [True] * 2]
SOUND_PADS = [2000, 0, 0, 2000]
"""Samples of padding at the end of 6,000."""


def pads_of(source: Any, video_pad: Any = "last", sound_pad: Any = "zeros", **settings: Any) -> None:
    rules = {
        "v": Video(frames=5, size=32, pad=video_pad, mask=True),
        "s": Audio(rate=16000, seconds=0.375, pad=sound_pad, mask=True),
    }
    dataset = ShardedDataset(source, decode=rules, columns=["v", "s"])
    with DataLoader(dataset, batch_size=4, **settings) as loader:
        (batch,) = loader
    assert list(batch) == ["v", "v_is_pad", "s", "s_is_pad"]
    assert (batch["v_is_pad"].dtype, batch["s_is_pad"].shape) == (torch.bool, (4, 6000))
    assert batch["v_is_pad"].tolist() == VIDEO_PADS
    assert batch["s_is_pad"].sum(1).tolist() == SOUND_PADS
    assert batch["s_is_pad"][0, 4000:].all()
    assert dataset[1]["v_is_pad"].tolist() == VIDEO_PADS[1]


@pytest.mark.parametrize(("form", "workers"), [("tar", 0), ("parquet", 0), ("tar", 1)])
def test_padding_of_short_clips_is_told_by_a_mask(uneven: dict[str, Path], form: str, workers: int) -> None:
    pads_of(uneven[form], "loop", "loop", num_workers=workers)


@pytest.mark.parametrize("remote", [False, True])
def test_padding_is_the_same_where_only_parts_of_a_video_are_read(
    uneven: dict[str, Path], remote: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataflow.staging.reading._LEAST_CUT_BYTES", 0)
    with serving(RangeServer(uneven["tar"].parent)) if remote else nullcontext() as server:
        pads_of(f"{server.url}/uneven.tar" if server else uneven["tar"])


def test_a_clip_that_is_missing_is_padding_and_one_that_is_bad_is_named_itself(tmp_path: Path) -> None:
    pq.write_table(pa.table({"v": [video(3), None]}), tmp_path / "gaps.parquet")

    def opened(**rule: Any) -> ShardedDataset[Any]:
        clip = Optional(Video(frames=5, size=32, mask=True, **rule), mask=True)
        return ShardedDataset(tmp_path / "gaps.parquet", decode={"v": clip})

    (batch,) = DataLoader(opened(pad="last"), batch_size=2)
    assert list(batch) == ["v", "v_is_pad", "v_mask"]
    assert batch["v_is_pad"].tolist() == [VIDEO_PADS[0], [True] * 5]
    assert batch["v_mask"].tolist() == [True, False]
    with pytest.raises(SampleError, match=r"column 'v': .*too short for a clip of 5 frames"):
        opened()[0]
    with pytest.raises(ValueError, match="needs frames="):
        Video(mask=True)
    with pytest.raises(ValueError, match="needs seconds="):
        Audio(mask=True)


def test_a_mask_of_padding_is_called_after_its_column(uneven: dict[str, Path]) -> None:
    rules = {"v": Video(frames=5, size=32, pad="last", mask=True)}
    tar = ShardedDataset(uneven["tar"], decode=rules, columns=["__key__", "v"])
    joined = tar.join(tar, on="__key__", suffix="_other")
    assert {"v_is_pad", "v_other", "v_other_is_pad"} < {*joined[0]}
    with pytest.raises(ValueError, match="adds a column 'v_is_pad', and there is one"):
        ShardedDataset(uneven["tar"], decode=rules, columns={"v": "v", "v_is_pad": "s"})


def test_clips_of_their_own_sizes_have_a_mask_of_padding_too(uneven: dict[str, Path]) -> None:
    rules = {
        "v": Video(frames=5, fps=30, pad="last", mask=True),
        "s": Audio(seconds=0.375, pad="zeros", mask=True),
    }
    (batch,) = DataLoader(ShardedDataset(uneven["tar"], decode=rules), batch_size=4)
    assert batch["v_is_pad"].tolist() == VIDEO_PADS
    assert [int(pads.sum()) for pads in batch["s_is_pad"]] == SOUND_PADS
