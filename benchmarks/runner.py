"""The process of every measurement: calls a function with JSON arguments, and tells what it gives.

    python -m benchmarks.runner MODULE:FUNCTION '[ARGUMENT, ...]'

Each event is a line of JSON on stdout; what else is printed goes to stderr. The last is "done" with the
result, or "failed" with the reason. A function with a parameter `tell` tells events on its way, and "done"
itself while its loader lives, as a peer's may take forever to end. Nothing is imported here but what any
Python has, because processes that a measurement spawns import this module again.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from inspect import signature
from typing import Any

Tell = Callable[..., None]
"""Called with an event's name and its values."""


def call_command(function: Callable[..., Any], *arguments: Any) -> list[str]:
    """The command that calls a module's function in a process of its own."""
    target = f"{module_name(function.__module__)}:{function.__name__}"
    return [sys.executable, "-m", "benchmarks.runner", target, json.dumps(arguments)]


def module_name(module: str) -> str:
    """The name by which `python -m` or an import finds a module, also if it is the one that was started."""
    spec = sys.modules[module].__spec__
    return spec.name.removesuffix(".__main__") if spec else module


def result_of(stdout: str) -> Any:
    """What the function gave, from all that its process wrote."""
    return json.loads(stdout.splitlines()[-1])["result"]


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


def main() -> None:
    target, arguments = sys.argv[1:]
    with telling() as tell:
        module, name = target.split(":")
        function = getattr(import_module(module), name)
        if "tell" in signature(function).parameters:
            function(*json.loads(arguments), tell=tell)
        else:
            tell("done", result=function(*json.loads(arguments)))


if __name__ == "__main__":
    main()
