"""Train with checkpoints under torchrun: end it at any time, and go on with another number of processes.

KILL_AT=12 torchrun --standalone --nproc-per-node 2 examples/elastic_training.py
torchrun --standalone --nproc-per-node 3 examples/elastic_training.py
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from dataflow import DataLoader, ShardedDataset, ShardWriter

GLOBAL_BATCH, STEPS, SAVE_EVERY = 24, 20, 5
KILL_AT = int(os.environ.get("KILL_AT", 0))  # a step after which the processes are lost
OUT = Path("out/elastic")

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
if rank == 0 and not (OUT / "train-0.tar").exists():
    with ShardWriter(f"{OUT}/train-%d.tar") as shards:
        for i in range(200):
            x = torch.randn(16) + 2 * (torch.arange(16) % 4 == i % 4)
            shards.write({"__key__": f"{i:03d}", "npy": x.numpy(), "cls": i % 4})
dist.barrier()

model = DistributedDataParallel(torch.nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
loader = DataLoader(ShardedDataset(f"{OUT}/*.tar"), GLOBAL_BATCH // num_ranks, shuffle=True, drop_last=True)
parts = {"model": model.module, "optimizer": optimizer, "loader": loader}
step, checkpoint = 0, OUT / "checkpoint.pt"
if checkpoint.exists():
    saved = torch.load(checkpoint, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    step = saved["step"]
while step < STEPS:  # one loop over the loader is one epoch, here of 8 steps
    for batch in loader:
        loss = torch.nn.functional.cross_entropy(model(batch["npy"]), batch["cls"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean := loss.detach() / num_ranks)
        step += 1
        if rank == 0:
            print(f"step {step} loss {mean.item():.4f}", flush=True)
            if step % SAVE_EVERY == 0:
                saved = {name: part.state_dict() for name, part in parts.items()} | {"step": step}
                torch.save(saved, OUT / "new")
                (OUT / "new").replace(checkpoint)  # never half a checkpoint
        if step == KILL_AT:
            os.kill(os.getpid(), 9)  # SIGKILL
        if step == STEPS:
            break
loader.close()
del model  # else DDP may wait for gloo's threads with the interpreter lock held, as Python ends
dist.destroy_process_group()
