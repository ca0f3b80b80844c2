"""FSDP2 with torch.distributed.checkpoint: model, optimizer and loader, for any number of ranks.

STOP=6 torchrun --standalone --nproc-per-node 2 examples/distributed_checkpoint.py
torchrun --standalone --nproc-per-node 3 examples/distributed_checkpoint.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from dataflow import DataLoader, ShardedDataset, ShardWriter

GLOBAL_BATCH, STEPS = 24, 8
STOP = int(os.environ.get("STOP", STEPS))
OUT = Path("out/checkpoint")

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
if rank == 0 and not (OUT / "train-0.tar").exists():
    with ShardWriter(f"{OUT}/train-%d.tar") as shards:
        for i in range(200):
            x = torch.randn(16) + 2 * (torch.arange(16) % 4 == i % 4)
            shards.write({"__key__": f"{i:03d}", "npy": x.numpy(), "cls": i % 4})
dist.barrier()

model = torch.nn.Linear(16, 4)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
loader = DataLoader(ShardedDataset(f"{OUT}/*.tar"), GLOBAL_BATCH // num_ranks, shuffle=True, drop_last=True)
saved = sorted(OUT.glob("step-*"))
# [load]
models, optimizers = get_state_dict(model, optimizer)
state = {"model": models, "optimizer": optimizers, "loader": loader, "step": 0}
if saved:
    dcp.load(state, checkpoint_id=saved[-1])
    set_state_dict(model, optimizer, model_state_dict=models, optim_state_dict=optimizers)
# [end]
step = state["step"]
for batch in loader:
    loss = torch.nn.functional.cross_entropy(model(batch["npy"]), batch["cls"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    dist.all_reduce(mean := loss.detach() / num_ranks)
    if rank == 0:
        print(f"step {step} loss {mean.item():.4f}", flush=True)
    if step == STOP:
        break
# [save]
models, optimizers = get_state_dict(model, optimizer)
state = {"model": models, "optimizer": optimizers, "loader": loader, "step": step}
saving = dcp.async_save(state, checkpoint_id=OUT / f"step-{step}")  # the position is that of this moment
# [end]
saving.result()
loader.close()
dist.destroy_process_group()
