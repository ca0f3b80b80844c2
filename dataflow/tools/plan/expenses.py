"""Money and energy of a run, from what was given; nothing is made up."""

from __future__ import annotations

from dataclasses import dataclass

from dataflow.tools.plan.step import Prediction


@dataclass(frozen=True)
class Prices:
    """The prices of a run. None: not known, and not counted."""

    node_hour: float | None = None
    """Price of one node for an hour."""
    egress_gb: float | None = None
    """For 10**9 bytes that leave the store."""
    node_watts: float | None = None
    """Watts of one node under this load."""


@dataclass(frozen=True, kw_only=True)
class Expenses:
    """The expenses of a whole run. None where a price or a power was not given."""

    hours: float
    updates: int
    nodes_cost: float | None
    egress_cost: float | None
    joules_per_update: float | None
    kwh: float | None

    @property
    def cost(self) -> float | None:
        """All that is known; None if nothing is."""
        known = [each for each in (self.nodes_cost, self.egress_cost) if each is not None]
        return sum(known) if known else None


def expenses(step: Prediction, nodes: int, samples: int, sample_bytes: float, prices: Prices) -> Expenses:
    """Return the expenses of a run of so many samples, epochs counted."""
    updates = -(-samples // step.batch)
    hours = updates * step.window_s / 3600
    joules = None if prices.node_watts is None else prices.node_watts * nodes * step.window_s
    return Expenses(
        hours=hours,
        updates=updates,
        nodes_cost=None if prices.node_hour is None else hours * nodes * prices.node_hour,
        egress_cost=None if prices.egress_gb is None else samples * sample_bytes / 1e9 * prices.egress_gb,
        joules_per_update=joules,
        kwh=None if joules is None else joules * updates / 3.6e6,
    )
