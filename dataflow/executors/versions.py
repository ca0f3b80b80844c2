"""Versions that must be the same in two processes that send each other pickles and names of code."""

from __future__ import annotations

import platform
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions that must be the same here and in a worker elsewhere: pickles and code are sent."""

    python: str
    dataflow: str
    torch: str

    @classmethod
    def here(cls) -> Versions:
        """Return the versions of this process."""
        return cls(
            python=".".join(platform.python_version_tuple()[:2]),
            dataflow=_version("dataflow-loader"),
            torch=_version("torch").partition("+")[0],  # one may be built for CUDA, the other not
        )

    def difference(self, other: Versions) -> str:
        """Return in words what another process has otherwise, and the cure; "": nothing."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                return (
                    f"it runs {field.name} {theirs}, this process {field.name} {ours}: install the same "
                    "version on all machines"
                )
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "that is not installed (its source is on the path)"
