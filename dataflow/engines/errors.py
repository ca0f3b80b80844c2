"""Errors of engines that are not there, or that lose what they were given."""

from __future__ import annotations

from sharding.errors import DataflowError


class EngineError(DataflowError):
    """An engine is not there, cannot be used, or does not answer; the text says the cure."""


class TaskLostError(EngineError):
    """The worker of a task died each time that it was tried."""
