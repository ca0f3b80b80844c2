"""What tests look at behind a loader over shards: its engine, and the session that serves the newest loop."""

from __future__ import annotations

from dataflow import DataLoader
from dataflow.stream.loader import StreamLoader
from dataflow.stream.session import Session


def stream_of(loader: DataLoader) -> StreamLoader:
    """The engine of a loader over shards."""
    stream = loader._stream
    assert stream is not None
    return stream


def session_of(loader: DataLoader) -> Session:
    """What serves the newest loop, or waits for the next."""
    session = stream_of(loader).sessions.newest
    assert session is not None
    return session
