"""Datasets and samplers for the tests with other packages; worker processes import this module."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import BatchSampler, Dataset, IterableDataset, get_worker_info

from dataflow import ShardedDataset, ShardWriter


class Numbers(Dataset[Any]):
    """Sample i is [i]."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index)])


class Stream(IterableDataset[Any]):
    """Numbers, dealt to the workers in turn; with a length."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self.size, step):
            yield torch.tensor([float(number)])


class Transformed(Dataset[Any]):
    """Images that a random transform has seen."""

    def __init__(self, transform: Callable[[torch.Tensor], torch.Tensor], size: int = 12) -> None:
        self.transform, self.size = transform, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.arange(3 * 8 * 8, dtype=torch.float32).reshape(3, 8, 8) + index
        return self.transform(image), index


class Compose:
    """One transform after another, as torchvision's."""

    def __init__(self, *transforms: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.transforms = transforms

    def __call__(self, image: torch.Tensor) -> torch.Tensor:
        for transform in self.transforms:
            image = transform(image)
        return image


def random_crop(image: torch.Tensor) -> torch.Tensor:
    """Draws from torch's generator, as torchvision's transforms do."""
    top, left = torch.randint(0, 3, (2,)).tolist()
    return image[:, top : top + 6, left : left + 6]


def random_flip(image: torch.Tensor) -> torch.Tensor:
    """Draws from Python's generator, as older transforms do."""
    return image.flip(-1) if random.random() < 0.5 else image


def random_noise(image: torch.Tensor) -> torch.Tensor:
    """Draws from numpy's global generator, as albumentations did."""
    return image + torch.from_numpy(np.random.standard_normal(image.shape).astype(np.float32))


class Twins(BatchSampler):
    """A batch sampler of its own making: each index several times."""

    def __iter__(self) -> Iterator[list[int]]:
        for index in self.sampler:
            yield [index] * self.batch_size

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]


class Told(Dataset[Any]):
    """A dataset that its owner tells things through memory that all processes share."""

    def __init__(self) -> None:
        self.epoch = torch.tensor(0).share_memory_()
        self.table = torch.arange(12).share_memory_()
        self.even = self.table[::2]

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return int(self.epoch), self.even.clone()


# ---- graphs, as PyTorch Geometric has them --------------------------------------------------------------


class Graph:
    """A graph, with tensors in attributes."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.__dict__.update(tensors)


class GraphBatch(Graph):
    """Several graphs as one, whose nodes are numbered through."""

    pinned = False

    def pin_memory(self) -> GraphBatch:
        """What torch calls with `pin_memory=True`."""
        self.pinned = True
        return self


def batch_graphs(graphs: list[Graph]) -> GraphBatch:
    """A collate function: node numbers are shifted, features joined."""
    sizes = [len(graph.x) for graph in graphs]
    starts = np.cumsum([0, *sizes[:-1]])
    edges = [graph.edge_index + int(start) for graph, start in zip(graphs, starts, strict=True)]
    of = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(sizes))
    return GraphBatch(x=torch.cat([g.x for g in graphs]), edge_index=torch.cat(edges, dim=1), batch=of)


class Graphs(Dataset[Any]):
    """Rings of growing size."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Graph:
        nodes = torch.arange(index + 2)
        return Graph(x=torch.rand(index + 2, 3), edge_index=torch.stack([nodes, nodes.roll(1)]))


class Slotted:
    """An object without `__dict__`."""

    __slots__ = ("ids", "name")

    def __init__(self, ids: torch.Tensor, name: str) -> None:
        self.ids, self.name = ids, name


class Point(NamedTuple):
    """A named tuple."""

    x: torch.Tensor
    label: int


@dataclasses.dataclass
class Item:
    """A data class."""

    values: np.ndarray[Any, Any]
    point: Point
    slotted: Slotted


class Items(Dataset[Any]):
    """Samples that are data classes, with named tuples and slotted objects inside."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Item:
        ids = torch.arange(index + 1)
        return Item(np.full((2, 3), index, np.int16), Point(ids * 0.5, index), Slotted(ids, str(index)))


def as_list(samples: list[Any]) -> list[Any]:
    """A collate function that leaves samples as they are."""
    return samples


def named(samples: list[Any]) -> dict[str, torch.Tensor]:
    """A collate function for models that take their batch by name."""
    numbers = [sample["x.cls"] if isinstance(sample, dict) else sample for sample in samples]
    return {"numbers": torch.tensor([float(number) for number in numbers])[:, None]}


def doubled(batch: dict[str, list[Any]]) -> dict[str, Any]:
    """A batch-wise transform of Hugging Face datasets."""
    return {"twice": [2 * label for label in batch["label"]]}


def plain(value: Any) -> Any:
    """What a batch consists of, in plain values that compare."""
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), value.tolist())
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.tolist())
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return (type(value).__name__, [plain(item) for item in value])
    if dataclasses.is_dataclass(value):
        return (type(value).__name__, [plain(getattr(value, f.name)) for f in dataclasses.fields(value)])
    if isinstance(value, Slotted):
        return ("Slotted", plain(value.ids), value.name)
    if isinstance(value, Graph):
        return (type(value).__name__, plain(vars(value)))
    return value


def make_shards(folder: Path, num_samples: int = 40) -> ShardedDataset:
    """Shards of ten samples; sample i has the number i in its column "x.cls"."""
    with ShardWriter(str(folder / "train-%02d.tar"), max_count=10) as shards:
        for i in range(num_samples):
            shards.write({"__key__": f"{i:04d}", "x.cls": i})
    return ShardedDataset(str(folder / "train-*.tar"), catalog=str(folder / "catalog"))


def numbers_of(batch: Any) -> list[int]:
    """The samples' numbers in a batch of `Numbers`, `Stream` or `make_shards`."""
    column = batch["x.cls"] if isinstance(batch, dict) else batch
    return [int(number) for number in column.flatten()]


class Mapped(Dataset[Any]):
    """A dataset's samples, and whether this process has a file of that name mapped."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.dataset, self.name = dataset, name

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, Any]:
        maps = Path("/proc/self/maps").read_text()
        return {"label": self.dataset[index]["label"], "mapped": self.name in maps}
