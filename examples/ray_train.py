"""Ray Train over shards: after the loss of a worker training goes on at the next sample, also with fewer."""

import tempfile
from pathlib import Path

import numpy as np
import ray.train
import torch
from ray.train import Checkpoint, FailureConfig, Result, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from dataflow import DataLoader, ShardedDataset, ShardWriter

GLOBAL_BATCH = 20


def train(config: dict) -> None:
    """Train an epoch in this worker, from the last checkpoint on if there is one."""
    model = prepare_model(nn.Linear(16, 4), move_to_device=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    # [resume]
    context = ray.train.get_context()
    batch_size = GLOBAL_BATCH // context.get_world_size()  # the global batch stays
    loader = DataLoader(ShardedDataset(config["shards"]), batch_size, shuffle=True, seed=1, drop_last=True)
    parts, step = {"model": getattr(model, "module", model), "optimizer": optimizer, "loader": loader}, 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(f"{folder}/state.pt", weights_only=True)
        step = saved.pop("step")
        for name, state in saved.items():
            parts[name].load_state_dict(state)
    # [end]
    for batch in loader:
        step += 1
        loss = nn.functional.cross_entropy(model(batch["npy"]), batch["cls"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with tempfile.TemporaryDirectory() as folder:
            states = {name: part.state_dict() for name, part in parts.items()} | {"step": step}
            if context.get_world_rank() == 0:  # the loader's state is the same on all
                torch.save(states, f"{folder}/state.pt")
            given = Checkpoint.from_directory(folder) if context.get_world_rank() == 0 else None
            ray.train.report({"step": step, "samples": batch["index"].tolist()}, checkpoint=given)
    loader.close()


def fit(folder: str, workers: int | tuple[int, int]) -> Result:
    """Write 200 points and train on them; the last run in that folder goes on, if it was not finished."""
    rng = np.random.default_rng(0)
    with ShardWriter(f"{folder}/points.tar", overwrite=True) as shards:
        for i in range(200):
            x = rng.normal(size=16).astype(np.float32)
            shards.write({"__key__": f"{i:04d}", "npy": x, "cls": i % 4, "index": i})
    scaling, failures = ScalingConfig(num_workers=workers), FailureConfig(max_failures=2)
    run = RunConfig(name="points", storage_path=f"{folder}/runs", failure_config=failures)
    shards = {"shards": f"{folder}/points.tar"}
    return TorchTrainer(train, train_loop_config=shards, scaling_config=scaling, run_config=run).fit()


if __name__ == "__main__":
    print(
        f"{fit(str(Path('ray').resolve()), workers=(1, 2)).metrics['step']} steps"
    )  # one if there is no more
