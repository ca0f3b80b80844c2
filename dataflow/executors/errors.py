"""Errors of engines that are not there, or that lose what they were given."""

from __future__ import annotations

from sharding.errors import DataflowError

_SHOWN = 500
"""Characters of an engine's own error that are shown."""


class EngineError(DataflowError):
    """An engine is not there, cannot be used, or does not answer; the text says the cure."""


class TaskLostError(EngineError):
    """The worker of a task died each time that it was tried."""


def shown(error: BaseException) -> str:
    """Return an error of an engine in one line: some have a page of Java in them."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
