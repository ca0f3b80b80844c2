"""The Ray cluster that builders run on: the extra, the connection, its nodes, and which actors are refused.

A cluster is never started here: a local one would build on the very cores that were to be relieved. The
connection belongs to the process, as `ray.init` makes it; it stays when a loader is closed, for the next one.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharding.errors import DataflowError

_is_forked = False
"""True if this process has a copy of another one's connection, whose threads it lacks."""


def _note_fork() -> None:
    global _is_forked
    _is_forked = "ray" in sys.modules and sys.modules["ray"].is_initialized()


os.register_at_fork(after_in_child=_note_fork)


class RayClusterError(DataflowError):
    """There is no Ray cluster that could build, or it runs other versions."""


class BuilderActorError(DataflowError):
    """Actors that build died, and others would die the same way."""


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
        if _is_forked:
            raise RayClusterError(
                "this process was forked from one that was connected to a Ray cluster, and cannot use that "
                'connection: start it with "spawn" or "forkserver"'
            )
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


_PLACES = ("ray.io/availability-zone", "ray.io/availability-region")
"""Labels of nodes, the nearer first: Ray takes them from a Kubernetes pod, or from `ray start --labels`."""


@dataclass(frozen=True, kw_only=True)
class ClusterNodes:
    """The nodes of a cluster that live now: what there is for actors."""

    nodes: Sequence[Mapping[str, Any]]
    """The nodes, as `ray.nodes()` describes them."""
    home_id: str
    """Id of the node that the training process is on."""

    @classmethod
    def of(cls, ray: Any) -> ClusterNodes:
        """Return the nodes of the cluster that this process is connected to."""
        nodes = [node for node in ray.nodes() if node["Alive"]]
        return cls(nodes=nodes, home_id=ray.get_runtime_context().get_node_id())

    @property
    def num_cpus(self) -> int:
        """The number of CPUs of all nodes, whoever uses them."""
        return sum(int(node["Resources"].get("CPU", 0)) for node in self.nodes)

    def actors_of(self, num_ranks: int) -> int:
        """Return how many actors one rank of so many can have, if all are to have as many; at least one."""
        return max(1, self.num_cpus // max(1, num_ranks))

    def cpus_of_actor(self, num_ranks: int) -> float:
        """The CPUs that an actor reserves: one, or less if there are fewer than ranks.

        Then as many share a CPU as are needed, on whichever node that is.
        """
        if not self.num_cpus:
            return 1.0  # of a node that is yet to come
        sharing = max(1, -(-num_ranks // self.num_cpus))
        return int(10_000 / sharing) / 10_000  # Ray rounds to so many digits: up would be too much

    def near(self) -> dict[str, Any]:
        """Options of an actor that is to be near the training process, where there is room for it.

        Where nodes say in which zone they are: in its own, or its region. Nearer still is its own node, whose
        cores are to be relieved: that is treated as any other of the zone. Ray itself avoids nodes with GPUs.
        """
        home = next((node for node in self.nodes if node["NodeID"] == self.home_id), None)
        labels = {} if home is None else home.get("Labels", {})
        choices = [{"label_selector": {name: labels[name]}} for name in _PLACES if labels.get(name)]
        if not choices:
            return {}
        return {**choices[0], "fallback_strategy": [*choices[1:], {"label_selector": {}}]}

    def any_with_cpus(self) -> str | None:
        """Id of a node that has CPUs, whoever uses them; None: no node has any."""
        ids = [node["NodeID"] for node in self.nodes if node["Resources"].get("CPU", 0) >= 1]
        return secrets.choice(ids) if ids else None  # the generator of the training code is left alone
