"""Spans as a Chrome trace: for chrome://tracing, Perfetto, or HTA beside the profiler's own traces.

A process a rank, a lane for windows, phases and waits. Times are microseconds since the first span of all
ranks; between machines they are as good as their clocks agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dataflow.timing.window_times import Span

_LANES = {"window": 0, "phase": 1, "wait": 2}


def trace_of(ranks: Mapping[int, Sequence[Span]]) -> dict[str, Any]:
    """The trace of the ranks' spans, a JSON value."""
    start = min((span.began_s for spans in ranks.values() for span in spans), default=0.0)
    return {"traceEvents": [*_names(ranks), *_spans(ranks, start)], "displayTimeUnit": "ms"}


def write_trace(ranks: Mapping[int, Sequence[Span]], path: str) -> None:
    """Write it to a file."""
    with open(path, "w") as file:
        json.dump(trace_of(ranks), file)


def _names(ranks: Mapping[int, Sequence[Span]]) -> Iterator[dict[str, Any]]:
    for rank in ranks:
        yield {"ph": "M", "name": "process_name", "pid": rank, "tid": 0, "args": {"name": f"rank {rank}"}}
        for lane, number in _LANES.items():
            yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": number, "args": {"name": lane}}


def _spans(ranks: Mapping[int, Sequence[Span]], start: float) -> Iterator[dict[str, Any]]:
    for rank, spans in ranks.items():
        for span in spans:
            yield {
                "ph": "X",
                "name": span.name,
                "cat": span.lane,
                "pid": rank,
                "tid": _LANES[span.lane],
                "ts": (span.began_s - start) * 1e6,
                "dur": (span.ended_s - span.began_s) * 1e6,
            }
