"""Folders of files with a `metadata.csv` or in splits: the samples that Hugging Face's ImageFolder finds."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataflow import Optional, ShardedDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    datasets = pytest.importorskip("datasets")
simplejpeg = pytest.importorskip("simplejpeg")

pytestmark = [  # `datasets` leaves the tables open
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROWS = [("c/3.jpg", 'says "no", then\nü', 3), ("1.jpg", "one", 10), ("c/2.jpg", "two, three", 7)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "val"):
        for number, (name, _, _) in enumerate(ROWS):
            path = tmp_path / "images" / split / name
            path.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.full((8, 8, 3), 20 * number + 100 * (split == "val"), np.uint8)
            path.write_bytes(simplejpeg.encode_jpeg(pixels))
    return tmp_path / "images"


def theirs(folder: Path, split: str) -> list[dict[str, Any]]:
    datasets.disable_progress_bars()
    loaded = datasets.load_dataset(
        "imagefolder", data_dir=str(folder), split=split, cache_dir=str(folder.parent / f"cache-{split}")
    )
    loaded = loaded.cast_column("image", datasets.Image(decode=False))
    return [
        {**row, "image": row["image"]["bytes"] or Path(row["image"]["path"]).read_bytes()} for row in loaded
    ]


def ours(folder: Path, split: str, **more: Any) -> list[dict[str, Any]]:
    dataset = ShardedDataset(
        folder, split=split, decode={"jpg": None, "n": Optional("auto", default=-1)}, **more
    )
    return [
        {"image": bytes(row["jpg"].numpy()), "text": row["text"], "n": row["n"]}
        for row in map(dataset.__getitem__, range(len(dataset)))
    ]


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_table_in_the_folder_of_each_split_gives_the_same_rows(folder: Path, ending: str) -> None:
    for split in ("train", "val"):
        if ending == "csv":
            quoted = "".join(f'{name},"{text.replace(chr(34), chr(34) * 2)}",{n}\n' for name, text, n in ROWS)
            table = "file_name,text,n\n" + quoted
        else:
            lines = [{"file_name": name, "text": text, "n": n} for name, text, n in ROWS]
            table = "\n".join(map(json.dumps, lines))
        (folder / split / f"metadata.{ending}").write_text(table)
    for split in ("train", "validation"):
        by_n = {row["n"]: row for row in theirs(folder, split)}
        own = ours(folder, split)
        assert [row["n"] for row in own] == [n for _, _, n in ROWS]
        assert [by_n[row["n"]] for row in own] == own
