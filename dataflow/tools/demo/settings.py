"""The options of `dataflow demo`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from dataflow.tools.terminal.options import COUNT, option


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """The folder that the demo works in, and how much it does."""

    folder: Path | None = option(
        "Folder that shards and the checkpoint are written to and kept in.",
        click.Path(file_okay=False, path_type=Path),
        None,
        show_default="a temporary folder, removed at the end",
    )
    keep: bool = option("Keep the temporary folder.", bool, False)
    num_ranks: int = option("Number of processes that train.", COUNT, 2, "--ranks")
    steps: int = option("Number of training steps.", click.IntRange(min=2), 100)
    batch_size: int = option("Number of samples, of 128 bytes each, in a batch of a rank.", COUNT, 16)
    seed: int = option("Seed of the order and of the model's weights.", int, 0)
    max_modules: int | None = option(
        "Number of Python modules to train on.",
        COUNT,
        None,
        "--modules",
        show_default="all, about 11 MB",
    )
