"""Hugging Face datasets through `DataLoader`: values, states, and the table that no worker copies."""

from __future__ import annotations

import json
import warnings
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ecosystem_kit import Mapped, as_list, doubled, plain
from torch.utils.data import DataLoader as TorchDataLoader

from dataflow import DataLoader
from prefetch.ipc.payload import pack

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    datasets = pytest.importorskip("datasets")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),
]

SIZE = 37
Loader = type[TorchDataLoader[Any]]


@pytest.fixture(autouse=True)
def no_progress_bars() -> None:
    datasets.disable_progress_bars()


def rows(size: int = SIZE) -> dict[str, list[Any]]:
    pixels = np.arange(size * 6, dtype=np.float32).reshape(size, 2, 3)
    return {
        "pixels": pixels.tolist(),
        "label": list(range(size)),
        "text": [f"sample {i}" for i in range(size)],
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    datasets.disable_progress_bars()
    folder = str(tmp_path_factory.mktemp("saved") / "rows")
    datasets.Dataset.from_dict(rows()).save_to_disk(folder)
    return folder


# ---- map-style ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", [None, "numpy", "torch"])
def test_batches_are_those_of_torch(saved: str, form: str | None, workers: int) -> None:
    def batches(cls: Loader, dataset: Any) -> list[Any]:
        torch.manual_seed(4)
        return [plain(batch) for batch in cls(dataset, 5, shuffle=True, num_workers=workers)]

    for dataset in (datasets.load_from_disk(saved), datasets.Dataset.from_dict(rows())):
        formed = dataset.with_format(form)
        assert batches(DataLoader, formed) == batches(TorchDataLoader, formed)


def test_a_batch_is_read_by_one_call(saved: str) -> None:
    reads: list[dict[str, list[Any]]] = []
    dataset = datasets.load_from_disk(saved)
    name = dataset.column_names[0]
    watched = dataset.with_transform(lambda rows: (reads.append(rows), rows)[1], [name])
    assert len(list(DataLoader(watched, 20))) == 2
    assert [rows[name] for rows in reads] == [dataset[:20][name], dataset[20:][name]]


def test_workers_map_the_arrow_files_that_the_dataset_was_opened_from(saved: str) -> None:
    dataset = datasets.load_from_disk(saved)
    (name,) = {Path(file["filename"]).name for file in dataset.cache_files}
    assert len(pack(dataset, by_value=True).meta) < 10_000
    for mapped in DataLoader(Mapped(dataset, name), 7, num_workers=2):
        assert mapped["mapped"].all()


def test_a_table_in_memory_crosses_beside_the_pickle_and_is_mapped_by_all_workers() -> None:
    dataset = datasets.Dataset.from_dict({"vector": np.ones((2000, 100), np.float32)})
    table = dataset.data.nbytes
    packed = pack(dataset, by_value=True)
    assert len(packed.meta) < 10_000 < 800_000 <= table
    assert sum(nbytes for _, _, nbytes, _ in packed.parts) < 1.1 * table
    total = sum(
        float(batch["vector"].sum()) for batch in DataLoader(dataset.with_format("numpy"), 100, num_workers=2)
    )
    assert total == 2000 * 100


def test_transforms_and_mapped_columns_are_applied_in_the_workers(saved: str) -> None:
    dataset = datasets.load_from_disk(saved).with_transform(doubled)
    batches = list(DataLoader(dataset, 10, num_workers=2))
    assert torch.cat([batch["twice"] for batch in batches]).tolist() == [2 * i for i in range(SIZE)]


# ---- iterable -------------------------------------------------------------------------------------------


def streamed(num_shards: int = 4) -> Any:
    return datasets.Dataset.from_dict(rows()).to_iterable_dataset(num_shards=num_shards)


@pytest.mark.parametrize("workers", [0, 2, 3])
def test_streams_are_dealt_to_workers_as_with_torch(workers: int) -> None:
    ours, theirs = (
        [plain(batch) for batch in cls(streamed().with_format("torch"), 4, num_workers=workers)]
        for cls in (DataLoader, TorchDataLoader)
    )
    assert ours == theirs
    assert sorted(label for batch in ours for label in batch["label"][1]) == list(range(SIZE))


@pytest.mark.parametrize("workers", [0, 2])
def test_streams_resume_where_they_were(workers: int) -> None:
    def make() -> Any:
        return DataLoader(streamed(), 3, num_workers=workers, collate_fn=as_list)

    whole = [plain(batch) for batch in make()]
    for cut in (0, 1, 5, len(whole)):
        loader = make()
        head = [plain(batch) for batch in islice(loader, cut)]
        state = json.loads(json.dumps(loader.state_dict()))
        again = make()
        again.load_state_dict(state)
        assert head + [plain(batch) for batch in again] == whole, f"differs when resumed after {cut}"


@pytest.mark.parametrize("persistent", [False, True])
def test_the_epoch_of_a_stream_reaches_its_workers(persistent: bool) -> None:
    def epochs(cls: Loader) -> list[Any]:
        stream = streamed().shuffle(seed=1, buffer_size=10).with_format("torch")
        loader = cls(stream, 4, num_workers=2, persistent_workers=persistent)
        found = []
        for epoch in range(3):
            stream.set_epoch(epoch)
            found.append([plain(batch) for batch in loader])
        return found

    ours = epochs(DataLoader)
    assert ours == epochs(TorchDataLoader)
    assert ours[0] != ours[1] != ours[2]
