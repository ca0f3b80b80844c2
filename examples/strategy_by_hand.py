"""A strategy in a plain DDP loop, without GradSchedule: which of its methods is called when."""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dataflow.grad.strategies import Int8, StrategyContext
from dataflow.testing import run_ranks
from dataflow.topology_exchange import detect_topology


def train() -> tuple[list[float], int]:
    """Train ten steps on one of the ranks: its weights, and the bytes that it sent."""
    torch.manual_seed(0)
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # [loop]
    ddp = DistributedDataParallel(model)
    strategy = Int8()
    strategy.setup(
        StrategyContext(
            model=model,
            optimizer=optimizer,
            parameters={name: p for name, p in model.named_parameters() if p.requires_grad},
            group=dist.new_group(),
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            topology=detect_topology(),
        )
    )
    if strategy.hooks_gradients:
        ddp.register_comm_hook(None, lambda _, bucket: strategy.reduce(bucket))
    for step in range(10):
        x, y = torch.randn(16, 64), torch.randint(10, (16,))
        with nullcontext() if strategy.syncs(step) else ddp.no_sync():
            nn.functional.cross_entropy(ddp(x), y).backward()
        strategy.before_step(step)
        optimizer.step()
        strategy.after_step(step, skipped=False)
        optimizer.zero_grad()
    sent = strategy.bytes_sent()
    strategy.close()
    # [end]
    return model.weight.flatten().tolist(), sent


if __name__ == "__main__":
    (one, sent), (other, _) = run_ranks(train, 2, start_method="forkserver")
    print(f"{sent:,} bytes sent; the ranks' weights are equal to the bit: {one == other}")
