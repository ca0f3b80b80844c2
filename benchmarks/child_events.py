"""What measured processes have in common: how they tell their parent, and how they go on over epochs."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

Tell = Callable[..., None]
"""Called with an event's name and its values."""


@contextlib.contextmanager
def telling() -> Iterator[Tell]:
    """For events as JSON lines on stdout; what else is printed goes to stderr. An error is told too."""
    with os.fdopen(os.dup(1), "w", buffering=1) as events:
        os.dup2(2, 1)

        def tell(event: str, **values: Any) -> None:
            events.write(json.dumps({"event": event, **values}) + "\n")

        try:
            yield tell
        except BaseException as error:  # whatever a loader raises is a result of the benchmark
            lines = str(error).strip().splitlines() or [""]  # a worker's error ends with its cause
            tell("failed", reason=f"{type(error).__name__}: {lines[-1]}"[:300])
            raise


def forever(loader: Iterable[Any]) -> Iterator[Any]:
    """Epoch after epoch; the time a loader needs between epochs counts as waiting for a batch."""
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise RuntimeError("the loader gave an empty epoch")
