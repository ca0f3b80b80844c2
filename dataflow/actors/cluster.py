"""The Ray cluster that builders run on: the extra, the connection, and which actors are refused.

A cluster is never started here: a local one would build on the very cores that were to be relieved. The
connection belongs to the process, as `ray.init` makes it; it stays when a loader is closed, for the next one.
"""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from sharding.errors import DataflowError


class RayClusterError(DataflowError):
    """There is no Ray cluster that could build, or it runs other versions."""


class BuilderActorError(DataflowError):
    """Actors that build died, and others would die the same way."""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """What must be the same in the training process and in its actors: pickles and code cross."""

    python: str
    dataflow: str
    torch: str

    @classmethod
    def here(cls) -> Versions:
        """Those of this process."""
        return cls(
            python=".".join(platform.python_version_tuple()[:2]),
            dataflow=_version("dataflow-loader"),
            torch=_version("torch").partition("+")[0],  # the trainer's may be built for CUDA, an actor's not
        )

    def check(self, other: Versions, name: str) -> None:
        """Raise `RayClusterError` if an actor, of that name, runs others than we do."""
        for field in fields(self):
            ours, theirs = getattr(self, field.name), getattr(other, field.name)
            if ours != theirs:
                raise RayClusterError(
                    f"{name} runs {field.name} {theirs}, the training process {field.name} {ours}: install "
                    "the same version on all nodes of the Ray cluster"
                )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "that is not installed (its source is on the path)"


def connected_ray() -> Any:
    """The module `ray`, connected to a cluster that runs.

    Raises:
        ImportError: Ray is not installed.
        RayClusterError: no cluster runs, or one of another version.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("builders=\"ray\" needs `pip install 'dataflow-loader[ray]'`") from error
    if ray.is_initialized():
        return ray
    address = os.environ.get("RAY_ADDRESS", "auto")
    try:
        if address == "local":  # this would start one
            raise ConnectionError("RAY_ADDRESS is local")
        ray.init(address=address)
    except ConnectionError as error:
        raise RayClusterError(
            f"no Ray cluster was found at {address!r} ({error}): start one with `ray start --head`, join "
            "other machines with `ray start --address=<head>:6379`, and set RAY_ADDRESS or call "
            "ray.init(address=...)"
        ) from error
    except RuntimeError as error:  # Ray compares its own version and Python's
        raise RayClusterError(f"the Ray cluster at {address!r} cannot be used: {error}") from error
    return ray
