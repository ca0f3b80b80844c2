"""The settings of the commands of `dataflow bench`, and the dataset that they run over.

A dataset is shards, or what a function of the user's own makes: `package.module:name`. Its module is imported
because the user named it, from the current folder too, and it is called without arguments, in every process.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import click

from dataflow.tools.terminal.options import (
    COLUMNS,
    COUNT,
    POSITIVE,
    SIZE,
    DatasetArguments,
    Finite,
    argument,
    named_function,
    option,
    part,
    storage_options,
)
from dataflow.tools.verdicts.need import Requirement
from sharding.redaction import without_secrets

if TYPE_CHECKING:
    from dataflow.dataset import ShardedDataset
    from sharding.catalog.table import Catalog

Pattern = Literal["sequential", "random"]
_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


@dataclass(frozen=True, kw_only=True)
class Sweep(Requirement):
    """The cases of `dataflow bench storage`: every combination of order, block size and reads in flight."""

    source: Sequence[str] = argument(nargs=-1, required=True)
    patterns: Sequence[Pattern] = option(
        "Order in which blocks are read; may be repeated.",
        click.Choice(["sequential", "random"]),
        ("sequential", "random"),
        "--pattern",
        multiple=True,
    )
    block_bytes: Sequence[int] = option(
        "Bytes that one read asks for; may be repeated.",
        SIZE,
        (128 << 10, 2 << 20),
        "--block-size",
        multiple=True,
        metavar="SIZE",
        show_default="128KiB, 2MiB",
    )
    concurrency: Sequence[int] = option(
        "Number of reads at a time; may be repeated.",
        click.IntRange(1, 1024),
        (1, 4, 16),
        "--in-flight",
        multiple=True,
        metavar="N",
    )
    seconds: float = option("Seconds that each combination is measured for.", POSITIVE, 2.0)
    sample_bytes: int | None = option(
        "Bytes that are read for a sample, where --need counts samples.",
        SIZE,
        None,
        metavar="SIZE",
        show_default="from the catalog",
    )
    read: Literal["direct", "buffered"] | None = option(
        "Way local files are read: around the page cache by fio, or through it as training does.",
        click.Choice(["direct", "buffered"]),
        None,
        show_default="direct where fio is installed",
    )
    evict: bool = option("Ask the kernel to drop these files from memory before each case.", bool, False)
    require_cold: bool = option('Fail where the evidence does not allow the word "cold".', bool, False)
    split: str | None = option("Split of a folder, or of a dataset on the Hub.", None, None, metavar="NAME")
    config: str | None = option("Config of such a dataset.", None, None, metavar="NAME")
    columns: Any = option("Column to take, or NEW=OLD; blocks are read whole.", None, None, **COLUMNS)
    storage_options: Mapping[str, Any] = storage_options()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample_bytes is not None and self.need is None:
            raise click.UsageError("--sample-bytes is for --need in samples: give it, such as --need 16000/s")


@dataclass(frozen=True, kw_only=True)
class BenchDataset(DatasetArguments):
    """Shards, or a function of the user's own that makes the dataset. Picklable."""

    image_size: int | None = option(
        "Pixels a side of the random square that each image is cropped to.",
        COUNT,
        None,
        metavar="PIXELS",
        show_default="images as they are",
    )

    def to_json(self) -> dict[str, Any]:
        """JSON values without secrets: of options for the storage only their names."""
        return {
            "source": list(map(without_secrets, self.source)),
            "options": {**self.options, "storage_options": sorted(self.storage_options)},
            "image_size": self.image_size,
        }

    @property
    def function(self) -> str | None:
        """The `package.module:name`, unless the source is shards."""
        [*others, name] = self.source
        is_function = not others and _FUNCTION.fullmatch(name) and not os.path.exists(name)
        return name if is_function else None

    def open(self) -> Any:
        """The dataset, made anew.

        Raises:
            ImportError: the module that was named cannot be imported.
            ValueError: it has no such function, that makes no dataset, or options stand beside it.
            ShardReadError: shards that cannot be opened.
        """
        if self.function is not None:
            return self._from_function(self.function)
        dataset = self.open_with()
        if self.image_size is None:
            return dataset
        from dataflow.decode.image import Image
        from sharding.formats.extensions import IMAGE_EXTENSIONS

        images = [name for name in dataset.schema if name.lower().rpartition(".")[2] in IMAGE_EXTENSIONS]
        if not images:
            raise ValueError(f"--image-size: no column holds images; columns: {', '.join(dataset.schema)}")
        decode = {name: Image(size=self.image_size, crop="random_resized") for name in images}
        return self.open_with(decode=decode, catalog=dataset.catalog)

    def _from_function(self, function: str) -> Any:
        if self.options or self.image_size:
            raise ValueError(f"{function} makes the dataset: leave out the options that describe shards")
        dataset = named_function(function)()
        if not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__iter__"):
            raise ValueError(f"{function}() gave a {type(dataset).__name__}, which is no dataset")
        return dataset

    def open_shards(self) -> ShardedDataset:
        """The dataset, which must be a `ShardedDataset`."""
        from dataflow.dataset import ShardedDataset

        dataset = self.open()
        if not isinstance(dataset, ShardedDataset):
            raise ValueError(
                f"{self.function} makes a {type(dataset).__name__}; stages can be told apart over a "
                "ShardedDataset only. For any other dataset: dataflow bench compare"
            )
        return dataset


@dataclass(frozen=True, kw_only=True)
class Emulation(Requirement):
    """The settings of `dataflow bench loader`."""

    compute_ms: float = option("Milliseconds that the emulated accelerator computes a step.", Finite(min=0))
    ranks: int = option("Number of emulated accelerators, a process each.", COUNT, 1)
    batch_size: int = option("Number of samples in a batch of a rank.", COUNT, 64)
    memory_limit: int | None = option(
        "Bytes that a rank's loader may hold, as DataLoader(memory_limit=) takes it.",
        SIZE,
        None,
        metavar="SIZE",
        show_default="as the DataLoader's",
    )
    seconds: float = option("Seconds that each of five or six phases takes.", POSITIVE, 5.0)
    seed: int = option("Seed of the order.", int, 0)
    dataset: BenchDataset = part(BenchDataset)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The settings of `dataflow bench compare`."""

    batch_size: int = option("Number of samples in a batch.", COUNT, 64)
    workers: Sequence[int] = option(
        "Number of worker processes; may be repeated.",
        click.IntRange(min=0),
        (),
        multiple=True,
        metavar="N",
        show_default="0, and the number of cores",
    )
    repeats: int = option("Number of runs of each loader.", COUNT, 3)
    seconds: float = option("Seconds that a run takes after its first batch.", POSITIVE, 3.0)
    collate: str | None = option(
        "Function that both loaders use as collate_fn.",
        None,
        None,
        metavar="MODULE:NAME",
        show_default="each loader's own",
    )
    seed: int = option("Seed of the order.", int, 0)
    dataset: BenchDataset = part(BenchDataset)


def stored_sample_bytes(catalog: Catalog) -> float:
    """Bytes of the blocks of a catalog for each sample: what reading them takes."""
    return float(catalog.blocks.length.sum()) / max(1, catalog.num_samples)


def settings_json(settings: Emulation | Comparison) -> dict[str, Any]:
    """JSON values of all settings, without secrets."""
    values = {**asdict(settings), "given": settings.dataset.to_json()}
    del values["dataset"]
    return values
