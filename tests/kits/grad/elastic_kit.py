"""A training that goes on from its checkpoint; it imports little, since torchrun starts it over and over."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from dataflow import DataLoader, GradSchedule, ShardedDataset


def train_from(folder: Path, until: int, die_at: int = -1) -> tuple[list[list[int]], list[Tensor]]:
    """Train up to so many windows, from the checkpoint if there is one; save one after each window.

    Rank 1 is killed in window `die_at`, unless it was restarted.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1
    torch.manual_seed(0)
    model = nn.Linear(1, 1).double()
    ddp = DistributedDataParallel(model) if several else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    dataset = ShardedDataset(str(folder / "*.tar"), decode={"cls": "int"}, columns=["cls"])
    seen: list[list[int]] = []
    saved = folder / "checkpoint.pt"
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    with DataLoader(dataset, 2, shuffle=True, seed=5) as loader:
        sched = GradSchedule(loader, ddp, optimizer, global_batch=8, weights={"n": lambda b: len(b["cls"])})
        if saved.exists():
            state = torch.load(saved, weights_only=True)
            sched.load_state_dict(json.loads(state["sched"]))
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        window: list[int] = []
        for batch in sched:
            window += batch["cls"].tolist() if sched.scale() else []
            if sched.position.window == die_at and dist.get_rank() and not restarts:
                os.kill(os.getpid(), signal.SIGKILL)
            x = batch["cls"].view(-1, 1).double() / 100
            sched.backward(ddp(x).square().sum() * sched.scale("n"))
            if sched.step():
                seen, window = [*seen, window], []
                if not several or dist.get_rank() == 0:
                    sched_state = json.dumps(sched.state_dict())
                    parts = {"sched": sched_state, "model": model.state_dict()}
                    torch.save({**parts, "optimizer": optimizer.state_dict()}, folder / "new.pt")
                    (folder / "new.pt").replace(saved)  # the launcher may kill this rank at any time
                if sched.position.window == until:
                    break
    return seen, [p.detach().clone() for p in model.parameters()]
