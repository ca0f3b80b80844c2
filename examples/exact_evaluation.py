"""Evaluate on any number of processes: each sample counts once, predictions come in the order of the files.

torchrun --standalone --nproc-per-node 3 examples/exact_evaluation.py
"""

from pathlib import Path

import torch
import torch.distributed as dist

from dataflow import DataLoader, ShardedDataset, ShardWriter

OUT = Path("out/evaluation")


def main() -> None:
    """One of the processes."""
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    if rank == 0 and not (OUT / "test-0.tar").exists():
        with ShardWriter(f"{OUT}/test-%d.tar") as shards:
            for i in range(1_003):  # no multiple of 2 or 3
                x = torch.randn(16) + 2 * (torch.arange(16) % 4 == i % 4)
                shards.write({"__key__": f"{i:04d}", "npy": x.numpy(), "cls": i % 4})
    dist.barrier()
    model = torch.nn.Linear(16, 4, bias=False)
    model.weight.data = torch.eye(4).repeat(1, 4)  # as if it had been trained

    # Without shuffle= samples come in file order: a rank's part of a batch follows that of the rank before.
    dataset = ShardedDataset(f"{OUT}/test-0.tar")
    predictions, sums = [], torch.zeros(2, dtype=torch.int64)
    with torch.inference_mode(), DataLoader(dataset, batch_size=32, mark_repeats=True) as loader:
        for batch in loader:
            predicted = model(batch["npy"]).argmax(1)
            first_time = ~batch["__repeat__"]  # False: comes twice, to give all ranks as much
            sums += torch.stack([(predicted == batch["cls"])[first_time].sum(), first_time.sum()])

            own = torch.stack([predicted, first_time])
            parts = [torch.empty_like(own) for _ in range(num_ranks)]
            dist.all_gather(parts, own)  # every rank has as many samples, in the last batch too
            gathered, counts = torch.cat(parts, dim=1)
            predictions.extend(gathered[counts.bool()].tolist())
    dist.all_reduce(sums)

    if rank == 0:
        right, seen = sums.tolist()
        print(f"{right} of {seen} right: accuracy {right / seen:.4f}")
        (OUT / "predictions.txt").write_text("".join(f"{one}\n" for one in predictions))
        print(f"{len(predictions)} predictions in file order, the first {predictions[:12]}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
