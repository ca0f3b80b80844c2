"""Strategies say how gradients, or parameters, travel between ranks: what all of them begin from.

`Strategy` exchanges nothing; ours override their own part. `Wire` has the collectives, and counts what they
send. `ThreadedStrategy` waits for its collectives on a thread of its own, `BucketStrategy` for each bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.futures import Future

from prefetch.workers.ordered_thread import OrderedThread
from sharding.topology.topology import Topology


@dataclass(frozen=True, kw_only=True)
class StrategyContext:
    """The context that `GradSchedule` sets a strategy up with, once; the same on every rank but for `rank`.

    Attributes:
        model: the user's module, inside DDP's wrapper where there is one.
        optimizer: the optimizer that steps at the end of each window.
        parameters: name of each parameter that needs a gradient, as in `model.named_parameters()`;
            states that must outlive DDP's re-bucketing are kept by these names.
        group: a private process group for the strategy's own collectives; None in a single process.
        rank: of this process.
        world_size: number of ranks.
        topology: which ranks share a node, a rack.
        timeout_s: seconds that a rank waits for the others in `group`, and in groups that a strategy makes;
            None: PyTorch's default.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: Mapping[str, nn.Parameter]
    group: ProcessGroup | None
    rank: int
    world_size: int
    topology: Topology
    timeout_s: float | None = None


def all_reduce_bytes(nbytes: int, size: int) -> int:
    """Bytes that each of `size` ranks sends in a ring all-reduce of `nbytes`."""
    return 2 * (size - 1) * nbytes // size


def broadcast_bytes(nbytes: int, rank: int, size: int) -> int:
    """Bytes that `rank` sends on in a binomial-tree broadcast from rank 0."""
    return nbytes * sum(rank < 1 << k and rank + (1 << k) < size for k in range(size.bit_length()))


class Wire:
    """Collectives over one group, and the payload bytes that this rank sends by each. One caller at a time.

    Without a group, or with a group of one, every method is a local copy. Every method is called by all ranks
    of the group in the same order. The counts are those of the algorithms that gloo runs, and NCCL's rings:
    an all-reduce of n bytes among p ranks sends 2 (p - 1) / p n from each, all-to-all (p - 1) / p n, an
    all-gather p - 1 times what a rank has. `tests/dataflow/grad/test_strategies_bytes.py` holds them against
    what the sockets sent. NCCL may choose a tree, which moves up to 2 n; that is not counted here.

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
        count = counts[self.rank]
        received = rows.new_empty((self.size * count, *rows.shape[1:]))
        if self.size == 1:
            received.copy_(rows)
        else:
            dist.all_to_all_single(
                received, rows.contiguous(), [count] * self.size, list(counts), group=self.group
            )
            self.sent += (rows.shape[0] - count) * rows[:1].nbytes
        return received.view(self.size, count, *rows.shape[1:])

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


class Strategy:
    """Moves gradients (by a hook) or parameters (after a step) between ranks; this one exchanges nothing.

    Every method is called on every rank, in the same order. None is called by several threads at once,
    except `reduce`, which DDP calls from the thread of the backward pass, bucket after bucket.

    Args:
        name: as reported; equal on all ranks.
        settings: those that change the numbers.
    """

    name = key = ""
    """`key` has all settings that change the numbers: ranks compare it, checkpoints keep it."""
    hooks_gradients = False
    """True if `reduce` replaces DDP's all-reduce; False leaves DDP as it is."""
    short_memory = False
    """True if another may take its place at any step: it owes no gradients, ranks stay equal."""
    drifted = False
    """True if ranks have stepped by themselves since all parameters were last averaged."""
    context: StrategyContext
    wire: Wire
    """The wire over the context's group."""
    _other_wires: Sequence[Wire] = ()
    """The wires over the groups that it has made."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.name = name
        self.key = f"{name}({', '.join(f'{k}={v!r}' for k, v in settings.items())})"

    def setup(self, context: StrategyContext) -> None:
        """Begin; a `ValueError` says which combination is not supported, as parameters that FSDP2 shards."""
        sharded = next((n for n, p in context.parameters.items() if isinstance(p, DTensor)), None)
        if sharded is not None:
            raise ValueError(
                f"{self.name} needs whole parameters on each rank, but {sharded!r} is sharded; "
                "use DistributedDataParallel, or leave the reduction to FSDP2 with AllReduce()"
            )
        self.context = context
        self.wire, self._other_wires = Wire(context.group), ()
        self._names = {id(parameter): name for name, parameter in context.parameters.items()}

    def wire_among(self, members: Sequence[Sequence[int]]) -> Wire:
        """Make a group for each list of ranks, on all ranks alike; the wire is over the one of this rank.

        Over none if the rank is in no list, or alone in one. Ranks are numbered as in `context.group`, and
        `close` destroys the groups.
        """
        context, wire_group = self.context, None
        if context.group is None:
            members = ()
        if (num_ranks := sum(len(ranks) for ranks in members)) > context.world_size:
            raise ValueError(
                f"the topology is that of {num_ranks} ranks, and the model is on {context.world_size} of "
                "them: reducing by node needs a model on all ranks"
            )
        timeout = None if context.timeout_s is None else timedelta(seconds=context.timeout_s)
        for ranks in members:
            if len(ranks) > 1:  # on every rank, also for groups of others: that is how torch counts groups
                everyone = dist.get_process_group_ranks(context.group)
                backend = dist.get_backend(context.group)
                group = dist.new_group([everyone[rank] for rank in ranks], timeout, backend)
                wire_group = group if context.rank in ranks else wire_group
        wire = Wire(wire_group)
        self._other_wires = *self._other_wires, wire
        return wire

    def without_gradient(self) -> set[str]:
        """Names of the parameters that no rank has computed a gradient for, once gradients are reduced.

        DDP reduces them nevertheless, as zeros, and then leaves them out.
        """
        return {name for name, parameter in self.context.parameters.items() if parameter.grad is None}

    def names_in(self, bucket: GradBucket) -> tuple[str, ...]:
        """Names of the parameters of a bucket, in its order."""
        return tuple(self._names[id(parameter)] for parameter in bucket.parameters())

    def syncs(self, step: int) -> bool:
        """Return whether the window that ends with optimizer step `step` (0, 1, ...) reduces gradients."""
        return self.hooks_gradients

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """DDP's communication hook: the mean over ranks of the bucket's gradients, flat, in its dtype."""
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    def before_step(self, step: int) -> None:
        """Gradients are reduced and not yet clipped (a delayed update exchanges them here)."""

    def after_step(self, step: int, *, skipped: bool) -> None:
        """The optimizer has stepped; or every rank has skipped it, and the next step has the same number."""

    def lr_changed(self, ratio: float) -> None:
        """The learning rate became `ratio` times what it was (error feedback is rescaled)."""

    def scale_changed(self, ratio: float) -> None:
        """The GradScaler's scale, in which gradients come, became `ratio` times what it was.

        What is owed shrinks against gradients that are `ratio` times as large and mean the same.
        """
        self.lr_changed(1 / ratio)

    def bytes_sent(self) -> int:
        """Payload bytes that this rank has sent for gradients and parameters so far, over all groups."""
        return sum(wire.sent for wire in (self.wire, *self._other_wires))

    def state_dict(self) -> dict[str, Any]:
        """Tensors and numbers that a resumed run needs, kept by parameter name; {} if there are none."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; a `ValueError` if it does not fit."""
        self.check_entries(state, set())

    def close(self) -> None:
        """Give groups and threads back; may be called twice."""
        for wire in self._other_wires:
            if wire.group is not None and dist.is_initialized():  # else it went with the job's own
                dist.destroy_process_group(wire.group)
            wire.group = None

    def check_entries(self, state: Mapping[str, Any], entries: set[str]) -> None:
        """Raise `ValueError` unless the state has just these entries."""
        if set(state) != entries:
            raise ValueError(
                f"the state does not fit {self.key}: it has {sorted(state)}, wanted {sorted(entries)}; "
                "make the strategy with the settings of the run that saved it"
            )

    def checked_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies on the parameters' devices; `ValueError` for a name or shape that is not the model's."""
        for name, tensor in tensors.items():
            parameter = self.context.parameters.get(name)
            if parameter is None or parameter.shape != tensor.shape:
                shape = "no such parameter" if parameter is None else f"shape {tuple(parameter.shape)}"
                raise ValueError(
                    f"the state of {self.name} has {name!r} of shape {tuple(tensor.shape)}, "
                    f"the model has {shape}"
                )
        return {n: t.detach().to(self.context.parameters[n].device, copy=True) for n, t in tensors.items()}


# ---- on one ordered thread ------------------------------------------------------------------------------


class OrderedComm:
    """The one thread on which a strategy does what its communication hook is called for, bucket after bucket.

    A hook that needs several dependent collectives cannot wait for them in the callbacks of gloo's own
    threads: there are two, and with two buckets under way both wait for work that is queued behind them
    (PyTorch's PowerSGD hook hangs so). This thread waits, and starts all collectives of a private group in
    the order of the buckets, which DDP makes the same on all ranks. Args: `name`, of the thread.
    """

    def __init__(self, name: str) -> None:
        self._thread = OrderedThread(name)
        self._failure: BaseException | None = None

    def run(self, work: Callable[[], Tensor], like: Tensor) -> Future[Tensor]:
        """Do `work` after what was given before; the future has what it returns, or what it raises.

        Args:
            work: waits for its collectives itself.
            like: a tensor that the work reads; on a GPU, the work waits for what writes it now.
        """
        cuda = like.device if like.is_cuda else None
        future: Future[Tensor] = Future(devices=[cuda] if cuda else None)
        ready = torch.cuda.current_stream(cuda).record_event() if cuda else None

        def task() -> None:
            try:
                if self._failure is not None:  # later buckets would wait for ranks that have given up
                    raise self._failure
                if ready is not None:
                    torch.cuda.set_device(cuda)
                    torch.cuda.current_stream(cuda).wait_event(ready)
                result = work()
            except BaseException as error:
                self._failure = error
                future.set_exception(error)  # type: ignore[arg-type]
            else:
                future.set_result(result)

        self._thread.submit(task)
        return future

    def close(self) -> None:
        """Let the work end, and the thread. May be called twice. `TimeoutError` if it does not end."""
        self._thread.close()


class ThreadedStrategy(Strategy):
    """Communicates by blocking work on one ordered thread."""

    _comm: OrderedComm | None = None

    def setup(self, context: StrategyContext) -> None:
        """Start the thread that communicates."""
        super().setup(context)
        self._comm = OrderedComm(f"comm-{self.name}")

    @property
    def comm(self) -> OrderedComm:
        """The thread; `RuntimeError` where there is none."""
        if self._comm is None:
            raise RuntimeError(f"{self.name} is closed, or was never set up")
        return self._comm

    def close(self) -> None:
        """Wait for what is under way; end the thread, destroy the groups."""
        if self._comm is not None:
            self._comm.close()
            self._comm = None
        super().close()


class BucketStrategy(ThreadedStrategy):
    """Reduces each bucket on the thread."""

    hooks_gradients = True
    by_parameter = True
    """True if it takes a bucket apart, where DDP shows only the first half of a complex gradient."""

    def setup(self, context: StrategyContext) -> None:
        """Begin. `ValueError` for gradients that cannot be told apart."""
        for name, parameter in context.parameters.items() if self.by_parameter else ():
            if parameter.is_complex():
                raise ValueError(
                    f"{self.name} needs real gradients, and {name!r} is complex: keep it as a real one "
                    "(torch.view_as_real), or use AllReduce(), Half() or Hierarchical()"
                )
        super().setup(context)

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """`reduced` of the bucket, on the thread."""
        return self.comm.run(lambda: self.reduced(bucket), bucket.buffer())

    @torch.no_grad()
    def reduced(self, bucket: GradBucket) -> Tensor:
        """The mean over ranks, flat; called on the thread."""
        raise NotImplementedError
