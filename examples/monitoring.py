"""Watch a training from outside: metrics for Prometheus, health for schedulers, and a sentence."""

from urllib.request import urlopen

import torch
from torch import nn

from dataflow import DataLoader, ShardedDataset, ShardWriter, serve_metrics

SHOWN = ("dataflow_up", "dataflow_loader_samples_total", "dataflow_loader_starved_seconds_total")


def asked(address: str, path: str) -> str:
    """Ask as Prometheus or Kubernetes do."""
    with urlopen(f"http://{address}{path}", timeout=10) as answer:
        return answer.read().decode()


def main() -> None:
    """Train an epoch, and look at it."""
    with ShardWriter("points/%02d.tar", max_count=512, overwrite=True) as shards:
        for i in range(2048):
            shards.write({"__key__": f"{i:04d}", "npy": torch.randn(64).numpy(), "cls": i % 10})
    model = nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    dataset = ShardedDataset("points/*.tar")
    with (
        serve_metrics("127.0.0.1:0") as endpoint,  # 0: a port that is free
        DataLoader(dataset, batch_size=32, shuffle=True, seed=1) as loader,
    ):
        for batch in loader:
            loss = nn.functional.cross_entropy(model(batch["npy"]), batch["cls"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        lines = asked(endpoint.address, "/metrics").splitlines()
        print("\n".join(line for line in lines if line.startswith(SHOWN)))
        print("/healthz:", asked(endpoint.address, "/healthz").strip())
        print("/readyz:", asked(endpoint.address, "/readyz").strip())
        print("loader.health():", loader.health())


if __name__ == "__main__":
    main()
