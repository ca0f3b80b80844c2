"""Files that Hugging Face `datasets` has written: the same features, and the same samples that it gives."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image as Pillow

from dataflow import DataLoader, Image, Ragged, ShardedDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    datasets = pytest.importorskip("datasets")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
SIZE, EXACT = 7, Image(dct="exact")


def jpeg(number: int) -> dict[str, Any]:
    pixels = np.random.default_rng(number).integers(0, 256, (20 + number % 3, 30, 3), np.uint8)
    file = io.BytesIO()
    Pillow.fromarray(pixels).save(file, "JPEG")
    return {"bytes": file.getvalue(), "path": None}


@pytest.fixture(scope="module")
def written() -> Any:
    datasets.disable_progress_bars()
    image, label = datasets.Image(), datasets.ClassLabel(names=["cat", "dog"])
    features = datasets.Features(
        {
            "image": image,
            "images": datasets.List(image),
            "pair": datasets.List(image, length=2),
            "large": datasets.LargeList(image),
            "label": label,
            "labels": datasets.List(label),
            "texts": datasets.List(datasets.Value("string")),
            "info": datasets.Json(),
            "nested": {"image": image, "n": datasets.Value("int32")},
            "turns": [{"role": datasets.Value("string"), "score": datasets.Value("float32")}],
        }
    )
    rows = [
        {
            "image": jpeg(i),
            "images": [jpeg(10 * i + item) for item in range(i % 4)],
            "pair": [jpeg(i), jpeg(i + 1)],
            "large": [jpeg(i)] * (i % 2),
            "label": i % 2,
            "labels": [0, 1][: i % 3],
            "texts": ["a", None, "b"][: i % 4],
            "info": {"i": i, "deep": [None, {"x": i / 2}]},
            "nested": {"image": jpeg(i + 3), "n": i},
            "turns": [{"role": "user", "score": i / 4}],
        }
        for i in range(SIZE)
    ]
    return datasets.Dataset.from_list(rows, features=features)


@pytest.fixture(scope="module", params=["parquet", "arrow-stream"])
def opened(request: pytest.FixtureRequest, written: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Opens what `datasets` has written in one format."""
    folder = tmp_path_factory.mktemp("written")
    if request.param == "parquet":
        written.to_parquet(str(folder / "data.parquet"), batch_size=3)
        url = str(folder / "data.parquet")
    else:
        written.save_to_disk(str(folder))
        url = str(folder / "*.arrow")
    return lambda **options: ShardedDataset(url, format=request.param, **options)


def plain(value: Any) -> Any:
    """A value as nested lists and numbers."""
    if isinstance(value, Pillow.Image):
        return np.asarray(value).transpose(2, 0, 1).tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value


def test_samples_are_those_that_datasets_gives(written: Any, opened: Any) -> None:
    images = ["image", "images", "pair", "large", "nested.image"]
    dataset = opened(decode=dict.fromkeys(images, EXACT))
    assert len(dataset) == SIZE
    for row in range(SIZE):
        expected = written[row]
        nested = expected.pop("nested")
        expected |= {f"nested.{name}": value for name, value in nested.items()}
        assert plain(dataset[row]) == plain(expected)


def test_features_are_those_of_datasets(written: Any, opened: Any) -> None:
    dataset = opened()
    assert datasets.Features.from_dict(dataset.features) == written.features.flatten()
    assert dataset.features["label"]["names"] == ["cat", "dog"]


def test_batches_have_all_images_of_one_size_in_one_tensor(written: Any, opened: Any) -> None:
    sized = Image(size=8, dct="exact")
    with DataLoader(opened(decode={"images": sized, "image": sized}), SIZE) as loader:
        (batch,) = loader
    assert isinstance(batch["images"], Ragged)
    assert batch["images"].lengths.tolist() == [row % 4 for row in range(SIZE)]
    assert batch["image"].shape == (SIZE, 3, 8, 8)
    assert batch["label"].tolist() == written["label"][:]


@pytest.mark.parametrize("decode", [True, False])
def test_what_datasets_would_not_decode_stays_bytes_and_gray_stays_gray(tmp_path: Path, decode: bool) -> None:
    features = datasets.Features({"image": datasets.Image(mode="L", decode=decode)})
    path = str(tmp_path / "x.parquet")
    datasets.Dataset.from_list([{"image": jpeg(1)}], features=features).to_parquet(path)
    image = ShardedDataset(path)[0]["image"]
    assert image.shape == ((1, 21, 30) if decode else (len(jpeg(1)["bytes"]),))
