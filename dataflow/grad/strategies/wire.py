"""Collectives over one process group, and the payload bytes that this rank sends by each.

The counts are those of the algorithms that gloo runs, and NCCL's rings: an all-reduce of n bytes among p
ranks sends 2 (p - 1) / p n from each, all-to-all (p - 1) / p n, an all-gather p - 1 times what a rank has.
`tests/dataflow/grad/test_strategies_bytes.py` holds them against what the sockets sent. NCCL may choose a
tree, which moves up to 2 n; that is not counted here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.futures import Future


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """Bytes that each of `size` ranks sends in a ring all-reduce of `nbytes`."""
    return 2 * (size - 1) * nbytes // size


def broadcast_bytes(nbytes: int, rank: int, size: int) -> int:
    """Bytes that `rank` sends on in a binomial-tree broadcast from rank 0."""
    return nbytes * sum(rank < 1 << k and rank + (1 << k) < size for k in range(size.bit_length()))


class Wire:
    """One group; None, or a group of one, makes every method a local copy. One caller at a time.

    Every method is called by all ranks of the group in the same order.

    Attributes:
        rank: in the group.
        size: ranks of the group.
        sent: payload bytes that this rank has sent so far.
    """

    def __init__(self, group: ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.size = 1 if group is None else group.size()
        self.sent = 0

    def count_all_reduce(self, nbytes: int) -> None:
        """Count an all-reduce that someone else starts on the group."""
        self.sent += all_reduce_bytes(nbytes, self.size)

    def add(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over ranks."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
            self.count_all_reduce(tensor.nbytes)

    def mean(self, tensors: Iterable[Tensor]) -> None:
        """Replace tensors by their means over ranks: one all-reduce for each dtype and device."""
        if self.size == 1:
            return
        alike: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        for same in alike.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in same]).div_(self.size)
            self.add(flat)
            for tensor, part in zip(same, flat.split([t.numel() for t in same]), strict=True):
                tensor.copy_(part.view_as(tensor))

    def begin_add(self, flat: Tensor) -> Future[Tensor]:
        """Begin to replace a flat tensor by its sum over ranks."""
        if self.size == 1:
            result: Future[Tensor] = Future()
            result.set_result(flat)
            return result
        self.count_all_reduce(flat.nbytes)
        work = dist.all_reduce(flat, group=self.group, async_op=True)
        assert work is not None
        future: Future[Tensor] = work.get_future().then(lambda sums: sums.value()[0])
        return future

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of each rank, in rank order; all are of one shape."""
        if self.size == 1:
            return [tensor]
        tensors = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(tensors, tensor.contiguous(), group=self.group)
        self.sent += (self.size - 1) * tensor.nbytes
        return tensors

    def exchange(self, rows: Tensor, counts: Sequence[int]) -> Tensor:
        """Send the first `counts[0]` rows to rank 0, the next `counts[1]` to rank 1, and so on.

        Returns what the ranks sent here, [size, counts[rank], ...]; `counts` is the same on all ranks.
        """
        own = counts[self.rank]
        received = rows.new_empty((self.size * own, *rows.shape[1:]))
        if self.size == 1:
            received.copy_(rows)
        else:
            dist.all_to_all_single(
                received, rows.contiguous(), [own] * self.size, list(counts), group=self.group
            )
            self.sent += (rows.shape[0] - own) * rows[:1].nbytes
        return received.view(self.size, own, *rows.shape[1:])

    def add_at_first(self, tensor: Tensor) -> None:
        """Replace the tensor on rank 0 by the sum over ranks; elsewhere it is left undefined."""
        if self.size > 1:
            dist.reduce(tensor, group=self.group, group_dst=0)
            self.sent += tensor.nbytes if self.rank else (self.size - 1) * tensor.nbytes // self.size

    def copy_from_first(self, tensor: Tensor) -> None:
        """Replace the tensor by rank 0's."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)
            self.sent += broadcast_bytes(tensor.nbytes, self.rank, self.size)
