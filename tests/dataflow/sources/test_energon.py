"""Megatron-Energon's folders and metadatasets, against what its own reader gives."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dataflow import Mixture, ShardedDataset

FOLDER = Path(__file__).parent.parent.parent / "fixtures" / "energon"
EXPECTED = json.loads((FOLDER / "expected.json").read_text("utf-8"))
pytestmark = [pytest.mark.reads_here, pytest.mark.usefixtures("own_cache")]


def plain(value: Any) -> Any:
    """A value as expected.json has it."""
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.ndim:
        return {"array": value.tolist(), "dtype": value.dtype.name, "shape": list(value.shape)}
    return value.item() if hasattr(value, "item") else value


def as_delivered(value: Any, name: str) -> Any:
    """What the owner gave, as we have it: missing fields are no columns, bytes are tensors."""
    if isinstance(value, dict) and "bytes" in value:
        raw = list(bytes.fromhex(value["bytes"]))
        return {"array": raw, "dtype": "uint8", "shape": [len(raw)]}
    return value


@pytest.mark.parametrize("name", EXPECTED["datasets"])
def test_samples_are_those_of_its_own_reader(name: str) -> None:
    config, split = name.split("/")
    dataset = ShardedDataset(FOLDER / "images", split=split, config=f"{config}.yaml")
    found = [{key: plain(value) for key, value in dataset[i].items()} for i in range(len(dataset))]
    expected = [
        {key: as_delivered(value, key) for key, value in sample.items() if value is not None}
        for sample in EXPECTED["datasets"][name]
    ]
    for sample in expected:
        del sample["__key__"]
    assert found == expected


@pytest.mark.parametrize("name", EXPECTED["blends"])
def test_a_metadataset_mixes_what_its_own_reader_mixes(name: str) -> None:
    source, split = name.rsplit("/", 1)
    mixture = Mixture.from_energon(FOLDER / source, split=split)
    expected = EXPECTED["blends"][name]
    for member, other in zip(mixture.sources, expected["datasets"], strict=True):
        assert [member[i]["caption"] for i in range(len(member))] == other["captions"]
    if expected["mode"] == "dataset_weight":
        weights = [other["weight"] for other in expected["datasets"]]
        assert np.allclose([float(share) for share in mixture.shares], weights)
    elif expected["mode"] == "sample_repetitions":
        times = [Fraction(str(other["repetitions"])) for other in expected["datasets"]]
        sizes = [len(other["captions"]) for other in expected["datasets"]]
        total = sum(n * size for n, size in zip(times, sizes, strict=True))
        assert total <= len(mixture) < total + 1
    else:
        assert len(mixture) == len(expected["datasets"][0]["captions"])
