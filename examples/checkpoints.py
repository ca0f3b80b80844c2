"""The loop of the examples on text: steps from the last checkpoint on, and checkpoints on the way."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dataflow import DataLoader


def numbered_batches(
    loader: DataLoader[Any, Any],
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    *,
    folder: Path,
    steps: int,
    save_every: int,
) -> Iterator[tuple[int, Any]]:
    """(step, batch) from 1, or from the checkpoint in `folder`, to `steps`; a step is done when asked on."""
    step, checkpoint = 0, folder / "checkpoint.pt"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["loader"])
        step = saved["step"]
    while step < steps:  # one loop over the loader is one epoch
        for batch in loader:
            step += 1
            yield step, batch
            if step % save_every == 0 and dist.get_rank() == 0:
                state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
                state |= {"loader": loader.state_dict(), "step": step}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)
            if step == steps:
                break
