"""The topology of this rank, as far as its loader knows it: torch.distributed may come up later."""

from __future__ import annotations

import torch.distributed as dist

from dataflow.topology_exchange import detect_topology
from sharding.topology.topology import Topology


class RankTopology:
    """The topology of this rank: found when its loader is made, and again if torch.distributed came later.

    Args:
        given: by the user; None: it is found.

    Raises `ValueError` for contradictory variables of the launcher, if torch.distributed cannot tell better.
    """

    def __init__(self, given: Topology | None) -> None:
        self._is_open = given is None and not is_distributed()
        """True if it was found before torch.distributed was there to ask."""
        self._error: ValueError | None = None
        """Why the launcher's variables alone do not tell."""
        # Only ranks that know each other are placed by NUMA nodes.
        self._lacks_hardware = self._is_open
        self.topology = given or self._detected()

    def _detected(self) -> Topology:
        try:
            return detect_topology(sysfs="/sys" if not self._is_open else None)
        except ValueError as error:
            if not self._is_open or not dist.is_available():
                raise
            self._error = error  # Lightning sets a part of the variables, and torch.distributed later
            return Topology()

    def whole(self) -> Topology:
        """The topology with the hardware of this machine."""
        if self._lacks_hardware:
            self.topology, self._lacks_hardware = self.topology.with_hardware(), False
        return self.topology

    def resolve(self) -> bool:
        """Ask torch.distributed, if it came up meanwhile; whether the topology has been found anew.

        Raises `ValueError` where nothing tells.
        """
        if is_new := self._is_open and is_distributed():
            self._is_open, self._error, self._lacks_hardware = False, None, False
            self.topology = detect_topology()
        if self._error is not None:
            raise self._error
        return is_new


def is_distributed() -> bool:
    """Return whether torch.distributed can be asked."""
    return dist.is_available() and dist.is_initialized()
