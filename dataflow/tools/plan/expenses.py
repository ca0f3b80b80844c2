"""Money and energy of a run, from what was given or measured; nothing is made up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dataflow.tools.plan.step import Prediction

_POWERCAP = Path("/sys/class/powercap")


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


class Rapl:
    """The energy by Intel's and AMD's counters of whole packages (RAPL, read through powercap)."""

    name = "RAPL"

    def __init__(self, folder: Path = _POWERCAP) -> None:
        self._zones = sorted(folder.glob("intel-rapl:[0-9]")) + sorted(folder.glob("intel-rapl:[0-9][0-9]"))
        if not self._zones:
            raise OSError(f"{folder} has no intel-rapl zones: this machine shows no RAPL counters")
        self._range = [int((zone / "max_energy_range_uj").read_text()) for zone in self._zones]
        self._last = [self._read(zone) for zone in self._zones]  # PermissionError where only root may
        self._sum = 0

    @staticmethod
    def _read(zone: Path) -> int:
        return int((zone / "energy_uj").read_text())

    def joules(self) -> float:
        """Since this object was made; to be asked once a wrap of the counters, a minute or more."""
        now = [self._read(zone) for zone in self._zones]
        for was, value, most in zip(self._last, now, self._range, strict=True):
            self._sum += value - was if value >= was else value + most - was
        self._last = now
        return self._sum / 1e6


class Nvml:
    """The energy that NVIDIA's GPUs count themselves (NVML; package nvidia-ml-py)."""

    name = "NVML"

    def __init__(self) -> None:
        try:
            import pynvml
        except ImportError:
            raise OSError("NVML is read by the package nvidia-ml-py, which is not installed") from None
        try:
            pynvml.nvmlInit()
            devices = range(pynvml.nvmlDeviceGetCount())
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(number) for number in devices]
            self._read = pynvml.nvmlDeviceGetTotalEnergyConsumption
            self.joules()
        except pynvml.NVMLError as error:
            raise OSError(f"NVML cannot be read: {error}") from None

    def joules(self) -> float:
        """Since the driver was loaded."""
        return float(sum(self._read(device) for device in self._devices)) / 1e3


def find_meters() -> tuple[list[Nvml | Rapl], list[str]]:
    """The meters that can be read here, whose joules ever grow, and why others cannot."""
    meters: list[Nvml | Rapl] = []
    reasons: list[str] = []
    for kind in (Nvml, Rapl):
        try:
            meters.append(kind())
        except OSError as error:
            reasons.append(f"{kind.name}: {error}")
    return meters, reasons
