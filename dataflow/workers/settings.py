"""What the iterators of the drop-in loader see of the loader that they belong to.

`DataLoader` derives from this class, so that nothing here imports it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import DataLoader as TorchDataLoader

from dataflow.workers.choice import Decision
from dataflow.workers.resumed import Resumed


class WorkerLoader(TorchDataLoader[Any]):
    """Torch's loader with the settings and the position of ours."""

    workers: str
    """"process", "thread" or "auto"."""
    memory_limit: int
    """Bytes."""
    snapshot_every_n_steps: int
    _choice: Decision
    """Which kind of workers serves, and why."""
    _start: tuple[str, str]
    """How the workers of the loop begun last were started, and why so."""
    _tally: Any
    """The `Tally` of all iterators."""
    _progress: Any
    """The `Progress` of the loop begun last."""
    _chain: torch.Generator | None
    """What seeds of later epochs are drawn from after a resume."""
    _resumed: Resumed | None
    """Where the next loop goes on, if a state was loaded."""

    def _take_resumed(self) -> Resumed | None:
        resumed, self._resumed = self._resumed, None
        return resumed
