"""Megatron's data-parallel groups: its tensor- and pipeline-parallel ranks get the same batches.

torchrun --standalone --nproc-per-node 8 examples/megatron_groups.py
"""

from pathlib import Path

import torch
import torch.distributed as dist

from dataflow import DataLoader, ShardedDataset, ShardWriter
from dataflow.topology_exchange import detect_topology

OUT = Path("out/megatron")
TENSOR, CONTEXT, PIPELINE = 2, 1, 2

dist.init_process_group("gloo")
rank, num_ranks = dist.get_rank(), dist.get_world_size()
if rank == 0 and not (OUT / "0.jsonl").exists():
    with ShardWriter(f"{OUT}/%d.jsonl") as shards:
        for i in range(32):
            shards.write({"id": i})
dist.barrier()

# [groups]
# As Megatron numbers ranks, order "tp-cp-ep-dp-pp": tensor-parallel ranks lie together, stages far apart.
grid = torch.arange(num_ranks).reshape(PIPELINE, -1, CONTEXT, TENSOR)
group, _ = dist.new_subgroups_by_enumeration(grid.movedim(1, -1).flatten(0, -2).tolist())
# With Megatron or NeMo these two lines are: group = parallel_state.get_data_parallel_group()
data_ranks = [0] * num_ranks
dist.all_gather_object(data_ranks, dist.get_rank(group))
topology = detect_topology(replicate=data_ranks)
# [end]
with DataLoader(ShardedDataset(f"{OUT}/0.jsonl"), batch_size=4, topology=topology) as loader:
    batch = next(iter(loader))
stage, _, _, part = (grid == rank).nonzero()[0].tolist()
for each in range(num_ranks):
    dist.barrier()
    if rank == each:
        print(f"rank {rank}, stage {stage}, part {part}: samples {batch['id'].tolist()}", flush=True)
dist.barrier()
dist.destroy_process_group()
