"""How long a microbatch waits for another rank in the collectives of DDP and FSDP2.

They give no time-out of their own, so the group's counts: for gloo 30 minutes, unless the program said
otherwise. The group is the program's, which may wait in it for longer elsewhere (a barrier while one rank
evaluates), so its time-out is lowered from the forward pass of a microbatch to the end of its backward pass
only. NCCL's is left: its watchdog ends the process, which names nobody.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Deadline:
    """The time-out of a gloo group, lowered for a while. One thread.

    Args:
        group: of the model; None: there is nothing to lower.
        timeout_s: at most so long does a collective wait that begins meanwhile.
    """

    def __init__(self, group: dist.ProcessGroup | None, timeout_s: float) -> None:
        self._within = timedelta(seconds=timeout_s)
        self._gloo: Any = None
        self._usual: timedelta | None = None
        if group is not None and dist.get_backend(group) == "gloo":
            backend = group._get_backend(torch.device("cpu"))
            # Not with TORCH_DISTRIBUTED_DEBUG=DETAIL, whose wrapper does not tell its time-out.
            self._gloo = backend if hasattr(backend, "options") else None

    def begin(self) -> None:
        """Lower it, unless it is lower."""
        if self._gloo is not None and self._usual is None and self._gloo.options._timeout > self._within:
            self._usual = self._gloo.options._timeout
            self._gloo._set_default_timeout(self._within)

    def end(self) -> None:
        """Set it back."""
        if self._usual is not None:
            self._gloo._set_default_timeout(self._usual)
            self._usual = None
