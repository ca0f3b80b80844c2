"""Transforms in Python: what the kinds make, that loaders deliver it, and what is held against the bars."""

from __future__ import annotations

import io
import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from parameters_kit import in_full

pytest.importorskip("psutil")

from benchmarks.data import Data, Sizes
from benchmarks.harness import medians
from benchmarks.transforms.compare import POINT, TransformRun, checked, in_turns, plan, ratios, verdicts
from benchmarks.transforms.kinds import augmented, burned, kind
from benchmarks.transforms.loaders import DEFAULT, LOADERS, OURS, TORCH, wrong

TINY = Sizes(records=128, record_shards=2, record_bytes=1_100)
MINE = TransformRun(kind="2", loader=OURS, workers=2, samples_per_s=900.0, first_batch_s=0.2)
THEIRS = replace(MINE, loader=TORCH, samples_per_s=600.0, first_batch_s=0.1)
DEFAULTED = replace(MINE, loader=DEFAULT, workers=None)


@pytest.mark.parametrize("loader", [OURS, *in_full("WebDataset", "SPDL")])
def test_each_loader_delivers_every_sample_once(tmp_path: Path, loader: str) -> None:
    if loader != OURS:
        pytest.importorskip(loader.lower())
    data = Data(tmp_path, TINY)
    kind("0.001", data)
    run = TransformRun(kind="0.001", loader=loader, workers=2)
    assert checked(data, run).reason == ""


def test_a_loader_that_is_wrong_is_told(tmp_path: Path) -> None:
    data = Data(tmp_path, TINY)
    burning = kind("0.001", data)
    batch = torch.zeros(64, 1024), torch.zeros(64, dtype=torch.int64)
    assert wrong(burning, [batch, batch]).startswith("labels add up to 0")
    assert wrong(burning, [(batch[0][:1], batch[1][:1])]).startswith("batches of ")


@pytest.mark.full
def test_a_run_that_cannot_be_made_says_why(tmp_path: Path) -> None:
    broken = checked(Data(tmp_path, TINY), TransformRun(kind="no", loader=TORCH, workers=1))
    assert broken.reason.startswith("ValueError")


def test_burning_makes_floats_of_bytes() -> None:
    made = burned(bytes([0, 255]) * 600, random.random, cost_s=0.0)
    assert (made.shape, made.dtype, made[:2].tolist()) == ((1024,), torch.float32, [0.0, 1.0])


def test_pil_makes_pixels_that_follow_the_draws() -> None:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    pixels = np.random.default_rng(0).integers(0, 256, (60, 90, 3), np.uint8)
    image.fromarray(pixels).save(file, "JPEG")
    first, again, other = (augmented(file.getvalue(), random.Random(seed).random) for seed in (1, 1, 2))
    assert (first.shape, first.dtype) == ((224, 224, 3), torch.uint8)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_template_makes_512_tokens(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    chats = kind("template", Data(tmp_path, TINY))
    short = json.dumps({"messages": [{"role": "user", "content": "hello"}]}).encode()
    made = chats.make(short, random.random)
    assert (made.shape, made.dtype, made[-1]) == ((512,), torch.int64, 0)
    assert made[0] != 0


def test_ours_is_held_to_the_best_peer_with_as_many_workers_and_by_default_to_the_best_of_all() -> None:
    rows = [MINE, THEIRS, replace(THEIRS, workers=4, samples_per_s=1800.0), DEFAULTED]
    assert ratios(MINE, rows) == (1.5, 2.0)
    assert ratios(DEFAULTED, rows) == (0.5, 2.0)
    assert ratios(THEIRS, rows) == (None, None)
    says = [(v.bar, v.says) for v in verdicts(rows)]
    assert says == [
        ("x the best peer", "reached"),
        ("x torch's first batch", "short by 33.3 %"),
        ("x the best peer", "short by 50.0 %"),
    ]


def test_a_peer_that_failed_is_no_peer_and_is_not_run_again() -> None:
    failing, calls = replace(THEIRS, reason="broken"), []

    def measure(run: TransformRun) -> TransformRun:
        calls.append(run.loader)
        return replace(run, reason="broken" if run.loader == "Grain" else "")

    planned = [MINE, failing, replace(THEIRS, loader="Grain")]
    rows = medians(in_turns(planned, 2, measure), *POINT)
    assert calls == [OURS, "Grain", OURS]
    assert [row.reason for row in rows] == ["", "broken", "broken"]
    assert ratios(MINE, rows) == (None, None)


def test_by_default_ours_is_run_once_a_kind() -> None:
    planned = plan(["0.1", "pil"], [1, 2], list(LOADERS))
    assert [run.workers for run in planned if run.loader == DEFAULT] == [None, None]
    assert len(planned) == 2 * (2 * (len(LOADERS) - 1) + 1)
