"""An engine by its name: its package, its options, and whether a worker answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from importlib import import_module
from typing import Any

from msgspec import Struct

_log = logging.getLogger("dataflow")


class _Engine(Struct, frozen=True):
    """The way an engine is started; `module`'s `start(workers, options)` is a context manager."""

    module: str
    package: str = ""
    """The module that is imported of it; "": none."""
    extra: str = ""


_ENGINES = {
    "processes": _Engine("dataflow.engines.process_pool"),
}
ENGINES = tuple(_ENGINES)
"""Names of the engines."""


@contextmanager
def engine(
    name: str,
    *,
    workers: int | None = None,
    options: Mapping[str, str] = {},
    say: Callable[[str], object] = _log.info,
) -> Iterator[Executor]:
    """Start an engine, or join the one that runs; leaving the context ends what was started.

    An error or Ctrl-C in the block cancels the tasks that were submitted.

    Args:
        name: "processes".
        workers: tasks at a time; None: one for each CPU that this process may use.
        options: what the engine is told besides; "processes" takes none.
        say: called with a line that says which engine it is.

    Raises:
        ValueError: there is no engine of this name, or no such option.
        ImportError: its package is not installed; the text names the extra.
        EngineError: no worker of it answers.

    Examples:
        >>> with engine("processes", workers=1) as executor:
        ...     executor.submit(abs, -3).result()
        3
    """
    if name not in _ENGINES:
        raise ValueError(f"engine must be one of {', '.join(_ENGINES)}; got {name!r}")
    if workers is not None and workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}")
    chosen = _ENGINES[name]
    start: Callable[[int | None, Mapping[str, str]], AbstractContextManager[Executor]]
    start = import_module(chosen.module).start
    with start(workers, options) as executor:
        yield executor


def refuse_unknown(name: str, options: Mapping[str, Any], known: tuple[str, ...] = ()) -> None:
    """Raise `ValueError` for options that an engine does not have."""
    unknown = [option for option in options if option not in known]
    if unknown:
        has = f"it has {', '.join(known)}" if known else "it has none"
        raise ValueError(f"{name} has no option {unknown[0]!r}: {has}")
