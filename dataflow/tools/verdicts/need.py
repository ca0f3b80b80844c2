"""A rate that is needed, as a user writes it: samples a second, "16000/s", or bytes a second, "2GB/s"."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import click

from dataflow.tables import bytes_text
from dataflow.tools.terminal.options import Parsed, option

_RATE = re.compile(r"\s*([+-]?[\d.,_]+(?:e\d+)?)\s*([a-z]*)\s*(?:/\s*(\w+))?\s*", re.IGNORECASE)
_BYTES = re.compile(r"[kmgt]?(i?)b", re.IGNORECASE)
_SAMPLES = ("", "sample", "samples", "image", "images")
_SECOND = ("s", "sec", "second")
_FORM = "must be samples a second, such as 16000/s, or bytes a second, such as 2GB/s"


@dataclass(frozen=True)
class Need:
    """A rate that is needed."""

    text: str
    """The text that was given."""
    amount: float
    """Samples or bytes a second."""
    unit: Literal["samples", "bytes"]

    def to_json(self, sample_bytes: float | None) -> dict[str, Any]:
        """Return the need in both units, as JSON types; `sample_bytes`: of one sample, None if not known."""
        samples_per_s: float | None = self.amount
        bytes_per_s = sample_bytes and self.amount * sample_bytes
        if self.unit == "bytes":
            samples_per_s, bytes_per_s = sample_bytes and self.amount / sample_bytes, self.amount
        return {
            "asked": self.text,
            "unit": self.unit,
            "samples_per_s": samples_per_s,
            "bytes_per_s": bytes_per_s,
            "sample_bytes": sample_bytes,
        }


def parse_need(text: str) -> Need:
    """Return the need that a text names. `ValueError`, with what to write, for any other text."""
    from dataflow.limits import parse_bytes  # with numpy, which --help does without

    match = _RATE.fullmatch(text)
    if match is None:
        raise ValueError(f"{_FORM}, got {text!r}")
    number, unit, per = match.groups()
    if per is None:
        raise ValueError(f"{_FORM}, got {text!r} without a time: write {text.strip()}/s")
    if per not in _SECOND:
        raise ValueError(f"{_FORM}, got {text!r}, a rate for each {per!r}")
    try:
        amount = float(re.sub("[,_]", "", number))
    except ValueError:
        raise ValueError(f"{_FORM}, got {text!r}") from None
    if unit.lower() in _SAMPLES:
        kind: Literal["samples", "bytes"] = "samples"
    elif _BYTES.fullmatch(unit):
        if unit.endswith("b"):
            nbytes = re.sub("[ ,]", "", bytes_text(amount * parse_bytes(f"1{unit}") / 8))
            raise ValueError(f"{_FORM}, got {text!r}: a small b is bits, which are {nbytes}/s")
        amount, kind = amount * parse_bytes(f"1{unit}"), "bytes"
    else:
        raise ValueError(f"{_FORM}, got {text!r}: {unit!r} is no unit of samples or bytes")
    if not 0 < amount < math.inf:
        raise ValueError(f"must be more than 0 and finite, got {text!r}; leave --need out to ask for nothing")
    return Need(text.strip(), amount, kind)


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """The rate that a benchmark is asked about, and what its exit status says of it."""

    need: Need | None = option(
        "Rate that is needed, all ranks together: samples a second, such as 16000/s, or bytes, such as "
        "2GB/s. The report says whether it is reached.",
        Parsed("rate", parse_need),
        None,
        metavar="RATE",
    )
    strict: bool = option("Exit with status 1 unless the answer to --need is yes.", bool, False)

    def __post_init__(self) -> None:
        if self.strict and self.need is None:
            raise click.UsageError(
                "--strict is for the answer to --need: give a rate, such as --need 16000/s"
            )


def wanted_text(need: Mapping[str, Any]) -> str:
    """Such as "the 557 MB/s that are needed (16,000 samples/s of 34.8 kB)"."""
    text = f"the {bytes_text(need['bytes_per_s'])}/s that are needed"
    if need["unit"] == "samples":
        text += f" ({need['samples_per_s']:,.0f} samples/s of {bytes_text(need['sample_bytes'])})"
    return text
