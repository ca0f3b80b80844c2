"""OpenTelemetry: every figure of this process's loaders and schedules as an observable instrument.

A reader of the user's `MeterProvider` asks, in its own thread. Names and units are those of
`dataflow.telemetry.serving.instruments`: "dataflow.loader.samples" in "{sample}", by rank, node, dataset and
role.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from dataflow.integrations.versions import needed_for
from dataflow.telemetry.serving.instruments import Instrument, MetricPoint, all_instruments, points_of
from dataflow.telemetry.status.page import page_of_process

with needed_for(__name__, extra="metrics"):
    from opentelemetry import metrics

_SAME_S = 0.5
"""Seconds for which figures are the same: a reader asks for each instrument, one after the other."""


def instrument(provider: Any = None) -> None:
    """Make the instruments of all loaders and schedules of this process, also of those that come later.

    Args:
        provider: the `MeterProvider` that gets them, once each. None: the global one.

    Examples:
        >>> from opentelemetry.sdk.metrics import MeterProvider, export
        >>> reader, loader = export.InMemoryMetricReader(), DataLoader(range(8), name="numbers")
        >>> instrument(MeterProvider([reader]))  # a reader that exports does so from now on
        >>> batches = list(loader)
        >>> "dataflow.loader.batches" in reader.get_metrics_data().to_json()
        True
    """
    meter = (provider or metrics.get_meter_provider()).get_meter("dataflow")
    figures = _Figures()
    for spec in all_instruments():
        make = meter.create_observable_counter if spec.kind == "counter" else meter.create_observable_gauge
        make(spec.name, [figures.callback(spec)], spec.unit, spec.description)


class _Figures:
    """The figures of this process, asked for once a collection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards what follows
        self._points: dict[str, list[MetricPoint]] = {}
        self._until = 0.0

    def callback(self, one: Instrument) -> Callable[[metrics.CallbackOptions], Iterable[metrics.Observation]]:
        """Return what a reader calls for an instrument."""

        def observations(_: metrics.CallbackOptions) -> Sequence[metrics.Observation]:
            points = self._now().get(one.name, ())
            return [metrics.Observation(point.value, dict(point.attributes)) for point in points]

        return observations

    def _now(self) -> dict[str, list[MetricPoint]]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._points = {}
                for point in points_of([page_of_process().snapshot()]):
                    self._points.setdefault(point.instrument.name, []).append(point)
                self._until = time.monotonic() + _SAME_S
            return self._points
