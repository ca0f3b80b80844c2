"""The instruments: every figure of loaders and schedules with its name, kind, unit and description.

They are derived from the fields of the classes that hold the figures, and described by the docstrings there.
What only grows is a counter, all else a gauge. Rates and shares are no instruments: who looks at counters
takes them over any time. Names are OpenTelemetry's (`dataflow.loader.read.busy` in "s"); Prometheus has the
unit in the name (`dataflow_loader_read_busy_seconds_total`).
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from typing import Any, Literal

from msgspec import Struct

from dataflow.stats import PARTS_OF_STATS, LoaderStats, WorkerStats, is_count, numbers_of
from dataflow.telemetry.status.facts import counts_of, totals_of
from dataflow.telemetry.status.record import COUNTS_OF_SCHEDULES, LoaderRecord, ScheduleRecord, TrainingRecord

Attributes = dict[str, str]
_UNITS = {"depth": "{batch}", "in_flight_limit": "By", "queued": "{task}", "efficiency": "1"}
_RATIOS = ("_share", "_amplification")
_DERIVED = ("_per_s", "_share")


class Instrument(Struct, frozen=True, kw_only=True):
    """A figure as metrics know it."""

    name: str
    """The name with dots, such as "dataflow.loader.samples"."""
    kind: Literal["counter", "gauge"]
    unit: str
    """The unit in UCUM: "s", "By", "{sample}", "1"."""
    description: str

    @property
    def prometheus_name(self) -> str:
        """The name that Prometheus's conventions ask for; `_total` is added to counters."""
        name = self.name.replace(".", "_")
        suffix = {"s": "_seconds", "By": "_bytes"}.get(self.unit, "")
        return name if name.endswith(suffix) else name + suffix


class MetricPoint(Struct, frozen=True):
    """A value of an instrument, and whose it is."""

    instrument: Instrument
    value: float
    attributes: Attributes


@cache
def loader_instruments() -> dict[str, Instrument]:
    """Return the instruments of loaders by the names of `stats().flat()`."""
    metrics: dict[str, Instrument] = {}
    for kind in (LoaderStats, WorkerStats):
        for name, text in _figures("", kind):
            if not name.endswith(_DERIVED):
                metrics.setdefault(name, _instrument(f"dataflow.loader.{name}", text, counts=is_count(name)))
    return metrics


@cache
def other_instruments() -> dict[str, Instrument]:
    """Return the instruments of what is no figure of `stats()`, by the end of their names."""
    loader, schedule = _docs_of(LoaderRecord), _docs_of(ScheduleRecord)
    counts = {f"schedule.{name}": schedule.get(name) or name for name in COUNTS_OF_SCHEDULES}
    counts |= {"schedule.part_s": schedule["seconds"], "schedule.weight": schedule["totals"]}
    gauges = {
        "up": "1: the rank's process runs; 0: it has ended or died, and its gauges are gone.",
        "loader.running": "1: a loop runs; 0: the last one has ended, failed, or the loader was closed.",
        "loader.epoch": loader["epoch"],
        "loader.loop_batches": loader["loop_batches"],
        "loader.loop_length": loader["loop_length"],
        "loader.loop_began_timestamp_s": loader["loop_began_at"],
        "loader.last_batch_timestamp_s": loader["last_batch_at"],
        "schedule.step": "Optimizer steps, those of a loaded state included.",
        "schedule.window_s": schedule["window_s"],
    }
    return {
        name: _instrument(f"dataflow.{name}", text, counts=name in counts)
        for name, text in (counts | gauges).items()
    }


def all_instruments() -> list[Instrument]:
    """Return all instruments, by name."""
    every = [*loader_instruments().values(), *other_instruments().values()]
    return sorted(every, key=lambda instrument: instrument.name)


def points_of(records: Iterable[TrainingRecord]) -> Iterator[MetricPoint]:
    """Yield the values of all instruments.

    Processes that are gone have `dataflow.up` 0 and their counters: what holds at one time held once.
    """
    others = other_instruments()
    for record in records:
        process = {"rank": str(record.rank), "node": str(record.node)}
        yield MetricPoint(others["up"], float(record.is_alive), process)
        points = [point for loader in record.loaders for point in _loader_points(loader)]
        points += [point for schedule in record.schedules for point in _schedule_points(schedule)]
        yield from (point for point in points if record.is_alive or point.instrument.kind == "counter")


def _loader_points(entry: LoaderRecord) -> Iterator[MetricPoint]:
    others, instruments = other_instruments(), loader_instruments()
    labels = {"rank": str(entry.rank), "node": str(entry.node), "dataset": entry.name, "role": entry.role}
    for name, value in {**numbers_of(entry.stats), **totals_of(counts_of(entry.stats), entry.offset)}.items():
        if name in instruments:
            yield MetricPoint(instruments[name], value, labels)
    now: dict[str, float | None] = {
        "loader.running": float(entry.state == "running"),
        "loader.epoch": entry.epoch,
        "loader.loop_batches": entry.loop_batches,
        "loader.loop_length": entry.loop_length,
        "loader.loop_began_timestamp_s": entry.loop_began_at or None,
        "loader.last_batch_timestamp_s": entry.last_batch_at or None,
    }
    yield from (
        MetricPoint(others[name], float(value), labels) for name, value in now.items() if value is not None
    )


def _schedule_points(schedule: ScheduleRecord) -> Iterator[MetricPoint]:
    others = other_instruments()
    labels = {"rank": str(schedule.rank), "node": str(schedule.node), "dataset": schedule.loader}
    for name, value in totals_of(schedule.counts, schedule.offset).items():
        key, _, leaf = name.rpartition(".")
        instrument = others[{"": f"schedule.{leaf}", "part": "schedule.part_s"}.get(key, "schedule.weight")]
        yield MetricPoint(instrument, value, labels | ({key: leaf} if key else {}))
    yield MetricPoint(others["schedule.step"], schedule.steps, labels)
    yield MetricPoint(others["schedule.window_s"], schedule.window_s, labels)


# ---- what the classes say -------------------------------------------------------------------------------


def _instrument(name: str, text: str, *, counts: bool) -> Instrument:
    last = name.rpartition(".")[2]
    seconds = last.endswith("_s")
    unit = _UNITS.get(last) or ("s" if seconds else "By" if last.endswith("_bytes") else "")
    unit = unit or ("1" if last.endswith(_RATIOS) or not last.endswith("s") else f"{{{_singular(last)}}}")
    kind: Literal["counter", "gauge"] = "counter" if counts else "gauge"
    return Instrument(
        name=name.removesuffix("_s") if seconds else name,
        kind=kind,
        unit=unit,
        description=_sentence(text),
    )


def _singular(name: str) -> str:
    word = name.rpartition("_")[2]
    for end, other in (("ies", "y"), ("sses", "ss"), ("ches", "ch")):
        if word.endswith(end):
            return word.removesuffix(end) + other
    return word.removesuffix("s")


def _sentence(text: str) -> str:
    """The first sentence of a docstring, in one line, without marks of code."""
    line = " ".join(text.replace("`", "").split())
    end = line.find(". ")
    return (line if end < 0 else line[: end + 1]).rstrip(".")


def _figures(prefix: str, kind: type) -> Iterator[tuple[str, str]]:
    """Yield the names and docstrings of all numbers that `flat()` may have of a class."""
    docs = _docs_of(kind)
    for name, hint in _attributes(kind).items():
        if not prefix and name in PARTS_OF_STATS:
            continue
        for alternative in _alternatives(hint):
            if is_dataclass(alternative) and isinstance(alternative, type):
                yield from _figures(f"{prefix}{name}.", alternative)
            elif alternative in (int, float) or name == "image_warnings":
                yield prefix + name, docs.get(name) or name.replace("_", " ")


def _attributes(kind: type) -> dict[str, Any]:
    """Fields and properties of a class with their types."""
    hints = dict(typing.get_type_hints(kind))
    for base in kind.__mro__:
        for name, member in vars(base).items():
            if isinstance(member, property) and name[0] != "_" and member.fget is not None:
                hints.setdefault(name, typing.get_type_hints(member.fget).get("return"))
    return hints


def _alternatives(hint: Any) -> Sequence[Any]:
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


@cache
def _docs_of(kind: type) -> Mapping[str, str]:
    """Return the docstrings below a class's fields, and those of its properties, by name."""
    docs: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.partition(".")[0] not in ("dataflow", "prefetch", "sharding"):
            continue
        for name, member in vars(base).items():
            if isinstance(member, property) and member.__doc__:
                docs[name] = member.__doc__
        try:
            body: Any = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        except (OSError, SyntaxError):  # installed without sources: names must do
            continue
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                docs[ast.unparse(field.target)] = str(getattr(text.value, "value", ""))
    return docs
