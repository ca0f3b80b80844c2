"""`dataflow index --lengths --transform` measures what a transform will make: a first run has a length."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dataflow import DataLoader, Packed, ShardedDataset
from dataflow.tools.cli import main

MODULE = """
from dataflow import ShardedDataset

made = []

class Chats:
    fingerprint = "chats"

    def __init__(self, names=("text",)):
        self.names = names

    def __call__(self, sample):
        made.append(sample["n"])
        return {"ids": [7] * len(sample["text"]), "n": sample["n"]}

class Headers(Chats):
    fingerprint = "headers"

    def measure(self, sample):
        return {"ids": len(sample["text"]), "pixels": 3}

class Drawn(Headers):
    def measure(self, sample, rng):
        return {"ids": 1}

class Nameless(Headers):
    fingerprint = ""

chats, headers, drawn, nameless = Chats(), Headers(), Drawn(), Nameless()

def made_later():
    return Headers()

def dataset():
    return ShardedDataset("FOLDER/x.catalog", columns=["n", "text"], transform=Headers())

def others():
    return ShardedDataset("FOLDER/other.jsonl", transform=Headers())
"""
NUM = 60


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [json.dumps({"n": n, "text": "x" * (1 + n % 9)}) + "\n" for n in range(NUM)]
    (tmp_path / "data.jsonl").write_text("".join(rows))
    (tmp_path / "other.jsonl").write_text(rows[0])
    (tmp_path / "ahead_of_training.py").write_text(MODULE.replace("FOLDER", str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    assert _run("index", tmp_path / "data.jsonl", "--output", tmp_path / "x.catalog").exit_code == 0
    yield tmp_path
    sys.modules.pop("ahead_of_training", None)


def _run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, [*map(str, arguments)])


def _measured(folder: Path, name: str, *more: str) -> Any:
    return _run("index", folder / "x.catalog", "--lengths", "--transform", f"ahead_of_training:{name}", *more)


@pytest.mark.parametrize("name", ["headers", "made_later", "dataset"])
def test_what_is_measured_ahead_is_known_to_the_first_run_wherever_the_catalog_is_opened(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = _measured(folder, name)
    assert f"measured {NUM} of {NUM} samples" in shown.output
    assert "1 of lengths, in" in shown.output
    from ahead_of_training import Headers, made

    assert not made
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "elsewhere"))
    columns = {"columns": ["n", "text"]} if name == "dataset" else {}
    dataset = ShardedDataset(folder / "x.catalog", transform=Headers(), **columns)
    with DataLoader(dataset, 2, batching=Packed(16, "ids"), num_workers=0) as loader:
        assert len(loader) == len(list(loader))


def test_columns_that_balance_names_are_measured_too(folder: Path) -> None:
    assert "2 of lengths, in" in _measured(folder, "headers", "--lengths-of", "ids,pixels").output
    from ahead_of_training import Headers, made

    dataset = ShardedDataset(folder / "x.catalog", transform=Headers())
    batching = Packed(16, "ids", balance="pixels", budget={"pixels": 9})
    with DataLoader(dataset, 2, batching=batching, num_workers=0) as loader:
        assert len(loader)
    assert not made


def test_without_a_measure_each_sample_is_made_once(folder: Path) -> None:
    assert f"measured {NUM} of {NUM} samples" in _measured(folder, "chats", "--lengths-of", "ids").output
    from ahead_of_training import Chats

    dataset = ShardedDataset(folder / "x.catalog", transform=Chats())
    with DataLoader(dataset, 2, batching=Packed(16, "ids"), num_workers=0) as loader:
        assert len(loader) == len(list(loader))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("drawn", "not random"),
        ("nameless", "with a fingerprint"),
        ("others", "other shards"),
        ("nobody", "no function 'nobody'"),
    ],
)
def test_what_cannot_be_kept_is_refused(folder: Path, name: str, text: str) -> None:
    shown = _measured(folder, name)
    assert shown.exit_code
    assert text in " ".join(shown.output.split())


def test_a_transform_goes_with_lengths(folder: Path) -> None:
    shown = _run("index", folder / "x.catalog", "--transform", "ahead_of_training:headers")
    assert "give that, too" in " ".join(shown.output.split())
    shown = _run("index", folder / "x.catalog", "--column", "nope")
    assert "a catalog has all columns" in " ".join(shown.output.split())
