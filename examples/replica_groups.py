"""Ranks that hold parts of one model get the same batches: two groups of two tensor-parallel ranks.

torchrun --standalone --nproc-per-node 4 examples/replica_groups.py
"""

from pathlib import Path

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from dataflow import DataLoader, ShardedDataset, ShardWriter
from dataflow.topology_exchange import data_ranks_of_mesh, detect_topology

OUT = Path("out/replicas")

dist.init_process_group("gloo")
if dist.get_rank() == 0 and not (OUT / "0.jsonl").exists():
    with ShardWriter(f"{OUT}/%d.jsonl") as shards:
        for i in range(32):
            shards.write({"id": i})
dist.barrier()

# [topology]
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
topology = detect_topology(replicate=data_ranks_of_mesh(mesh, "dp"))
# Without a mesh: detect_topology(replicate=2), ranks 0 and 1 share data, 2 and 3 share data, ...
# or the data rank of each rank: detect_topology(replicate=[0, 0, 1, 1])
# [end]
with DataLoader(ShardedDataset(f"{OUT}/0.jsonl"), batch_size=4, topology=topology) as loader:
    batch = next(iter(loader))
for rank in range(dist.get_world_size()):
    dist.barrier()
    if rank == dist.get_rank():
        line = f"data rank {topology.data_rank} of {topology.data_world_size}, samples {batch['id'].tolist()}"
        print(f"rank {rank}: {line}", flush=True)
dist.barrier()
dist.destroy_process_group()
