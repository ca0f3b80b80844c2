"""What a communication hook has to do runs on one thread, bucket after bucket.

A hook that needs several dependent collectives cannot wait for them in the callbacks of gloo's own threads:
there are two, and with two buckets under way both wait for work that is queued behind them (PyTorch's
PowerSGD hook hangs so). Here one thread of ours waits, and starts all collectives of a private group in the
order of the buckets, which DDP makes the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from dataflow.grad.strategies.strategy import PassiveStrategy, StrategyContext
from prefetch.workers.ordered_thread import OrderedThread


class OrderedComm:
    """The thread of one strategy. Args: `name`, of the thread."""

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


class BucketStrategy(PassiveStrategy):
    """Reduces each bucket by blocking work on one ordered thread."""

    hooks_gradients = True
    _comm: OrderedComm | None = None

    def setup(self, context: StrategyContext) -> None:
        """Start the thread."""
        super().setup(context)
        self._comm = OrderedComm(f"comm-{self.name}")

    def reduce(self, bucket: GradBucket) -> Future[Tensor]:
        """`reduced` of the bucket, on the thread."""
        if self._comm is None:
            raise RuntimeError(f"{self.name} is closed, or was never set up")
        return self._comm.run(lambda: self.reduced(bucket), bucket.buffer())

    @torch.no_grad()
    def reduced(self, bucket: GradBucket) -> Tensor:
        """The mean over ranks, flat; called on the thread."""
        raise NotImplementedError

    def close(self) -> None:
        """End the thread."""
        if self._comm is not None:
            self._comm.close()
            self._comm = None
