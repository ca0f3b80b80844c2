"""The same steps by three forms of the loop: flat, by windows, and as with Accelerate."""

import torch
from torch.nn.functional import cross_entropy

from dataflow import GradSchedule

torch.manual_seed(0)
BATCHES = [{"x": torch.randn(n, 8), "y": torch.randint(4, (n,))} for n in (5, 3, 4, 6, 2, 4)]


def make() -> tuple[torch.nn.Module, torch.optim.Optimizer, GradSchedule]:
    """Make the same training anew; any iterable of batches is a loader."""
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weights = {"samples": lambda batch: len(batch["y"])}
    return model, optimizer, GradSchedule(BATCHES, model, optimizer, accumulate=2, weights=weights)


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Sum of the losses of a batch."""
    return cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


model, optimizer, sched = make()
for batch in sched:
    sched.backward(loss_of(model, batch) * sched.scale("samples"))
    if info := sched.step():
        print(f"flat: step {info.step}, {info.totals['samples']:.0f} samples")

# [windows]
by_windows, optimizer, sched = make()
for window in sched.windows():
    for batch in window:
        sched.backward(loss_of(by_windows, batch) * sched.scale("samples"))
    info = sched.step()
# [end]

# [accumulate]
with_blocks, optimizer, sched = make()
for batch in sched:
    with sched.accumulate("samples"):  # scales the loss, and steps at the end of a window
        sched.backward(loss_of(with_blocks, batch))
print(f"with blocks: step {sched.last.step}")
# [end]

for other in (by_windows, with_blocks):
    assert torch.equal(model.weight, other.weight)
print("the same weights")
