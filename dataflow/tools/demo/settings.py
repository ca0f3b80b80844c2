"""What a user may choose of `dataflow demo`: the options of the command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from dataflow.tools.terminal.options import COUNT, option


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Where the demo works, and how much of it."""

    folder: Path | None = option(
        "Where shards and checkpoint go, to stay there.  [default: a temporary folder, removed at the end]",
        click.Path(file_okay=False, path_type=Path),
        None,
    )
    keep: bool = option("Leave the temporary folder.", bool, False)
    num_ranks: int = option("Processes that train.", COUNT, 2, "--ranks")
    steps: int = option("Training steps.", click.IntRange(min=2), 200)
    batch_size: int = option("Samples of 128 bytes a rank and step.", COUNT, 16)
    seed: int = option("Seed of order and model.", int, 0)
    max_modules: int | None = option(
        "Use only so many modules.  [default: all, about 11 MB]", COUNT, None, "--modules"
    )
