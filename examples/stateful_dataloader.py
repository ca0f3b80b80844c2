"""Code that was written for torchdata's StatefulDataLoader: only its import is another one."""

import itertools

import torch

from dataflow import DataLoader as StatefulDataLoader  # torchdata.stateful_dataloader has one of that name


def loader(num_workers: int) -> StatefulDataLoader:
    """Give a loader with the arguments of torchdata's."""
    torch.manual_seed(0)
    options = {"shuffle": True, "num_workers": num_workers, "snapshot_every_n_steps": 2}
    return StatefulDataLoader(range(40), batch_size=4, **options)


if __name__ == "__main__":
    # [resume]
    before = loader(num_workers=2)
    first = [batch.tolist() for batch in itertools.islice(before, 3)]
    state = before.state_dict()
    after = loader(num_workers=2)  # in a new process; ours takes another number of workers as well
    after.load_state_dict(state)
    rest = [batch.tolist() for batch in after]
    # [end]
    print(f"{len(first)} batches, then {len(rest)}: {first[-1]}, {rest[0]} ...")
