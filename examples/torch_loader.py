"""A training script with torch's DataLoader, and with this one: one import changes, and it can resume."""

import torch
from torch import nn
from torch.utils.data import DataLoader as TorchLoader, Dataset

from dataflow import DataLoader


class Digits(Dataset):
    """Your dataset: any object with `__len__` and `__getitem__`."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, i: int):
        generator = torch.Generator().manual_seed(i)
        label = i % 10
        return torch.randn(64, generator=generator) + label / 3, label


def before() -> list[int]:
    """Train an epoch with torch's loader."""
    torch.manual_seed(0)
    # [before]
    loader = TorchLoader(Digits(), batch_size=50, shuffle=True, num_workers=2)
    return [train(x, y) for x, y in loader]
    # [end]


def after() -> list[int]:
    """Train the same epoch with this one; halfway the loader is made anew, as after a crash."""
    torch.manual_seed(0)
    # [after]
    loader = DataLoader(Digits(), batch_size=50, shuffle=True, num_workers=2)
    seen = []
    for x, y in loader:
        seen.append(train(x, y))
        if len(seen) == 8:
            state = loader.state_dict()  # JSON: save it beside the model
            break
    resumed = DataLoader(Digits(), batch_size=50, shuffle=True, num_workers=1)
    resumed.load_state_dict(state)
    return seen + [train(x, y) for x, y in resumed]
    # [end]


model = nn.Linear(64, 10)


def train(x: torch.Tensor, y: torch.Tensor) -> int:
    """A step of your training; here it only tells which labels came."""
    nn.functional.cross_entropy(model(x), y).backward()
    return int(y.sum())


if __name__ == "__main__":
    a, b = before(), after()
    print(f"{len(a)} batches; the same samples in the same order: {a == b}")
