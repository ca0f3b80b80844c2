"""What Linux's sysfs tells of this machine: NUMA nodes, GPUs, network cards.

A reading is a function of the files below `sysfs` (so a test gives it a folder) and of the CPUs that this
process may use. It never guesses: what the files do not tell is None, with the reason.
Containers show the devices of the whole machine here, those that they cannot use among them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple


class Fact(NamedTuple):
    """A number, or None and why it is not known."""

    value: int | None
    why_unknown: str = ""


_GPU_CLASSES = ("0x0302", "0x0380", "0x1200")
"""PCI base and sub class: 3D controller, display controller of no other kind, processing accelerator."""
_GPU_VENDORS_OF_VGA = ("0x10de", "0x1002")
"""NVIDIA's and AMD's VGA controllers are GPUs; others' draw the console of a server's management board."""


def read_hardware(
    sysfs: str = "/sys", cpus: Iterable[int] | None = None, gpu: str | None = None
) -> Mapping[str, Fact]:
    """The facts of a `Topology` that sysfs may tell, by name.

    Args:
        sysfs: where sysfs is mounted.
        cpus: CPUs that this process may use; None: ask the system.
        gpu: PCI address of this rank's GPU, such as "0000:17:00.0"; None: not known.

    Missing or damaged files are no errors; `ValueError` is for a `gpu` that is no address.
    """
    root = Path(sysfs)
    nodes = _cpus_of_numa_nodes(root)
    gpus, nics = _gpus(root), _nics(root)
    return {
        "numa_node": _numa_node_of_cpus(nodes, frozenset(os.sched_getaffinity(0) if cpus is None else cpus)),
        "gpu_numa_node": _numa_node_of_gpu(root, gpus, gpu),
        "nic_numa_node": _numa_node_of_any(root, nics, "network card"),
        "num_numa_nodes": _number_of(nodes, "sysfs has no devices/system/node"),
        "num_gpus": _number_of(gpus, "sysfs has no bus/pci/devices"),
        "num_nics": _number_of(nics, "sysfs has no class/net"),
    }


def cpu_list(text: str) -> frozenset[int]:
    """The CPUs of the kernel's list form, such as "0-3,8". Raises `ValueError` for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _number_of(things: Mapping[int, object] | list[Path] | None, why: str) -> Fact:
    return Fact(None, why) if things is None else Fact(len(things))


def _cpus_of_numa_nodes(root: Path) -> dict[int, frozenset[int]] | None:
    """CPUs by NUMA node (none for a node that is memory only)."""
    nodes = {}
    for path in _listed(root / "devices/system/node") or []:
        if number := re.fullmatch(r"node(\d+)", path.name):
            try:
                nodes[int(number[1])] = cpu_list(_text(path / "cpulist") or "")
            except ValueError:
                return None
    return nodes or None


def _numa_node_of_cpus(nodes: Mapping[int, frozenset[int]] | None, cpus: frozenset[int]) -> Fact:
    if nodes is None:
        return Fact(None, "sysfs has no devices/system/node")
    homes = sorted(node for node, own in nodes.items() if own & cpus)
    if len(homes) == 1:
        return Fact(homes[0])
    if not homes:
        return Fact(None, "no NUMA node in sysfs has this process's CPUs")
    return Fact(None, f"this process is not bound: it may use CPUs of NUMA nodes {_words(homes)}")


def _gpus(root: Path) -> list[Path] | None:
    devices = _listed(root / "bus/pci/devices")
    return None if devices is None else [path for path in devices if _is_gpu(path)]


def _is_gpu(device: Path) -> bool:
    kind = (_text(device / "class") or "")[:6]
    return kind in _GPU_CLASSES or (kind == "0x0300" and _text(device / "vendor") in _GPU_VENDORS_OF_VGA)


def _nics(root: Path) -> list[Path] | None:
    """Network interfaces with a device behind them: no loopback, bridges, bonds or tunnels."""
    interfaces = _listed(root / "class/net")
    return None if interfaces is None else [p / "device" for p in interfaces if (p / "device").exists()]


def _numa_node_of_gpu(root: Path, gpus: list[Path] | None, address: str | None) -> Fact:
    if address is None:
        return _numa_node_of_any(root, gpus, "GPU")
    device = root / "bus/pci/devices" / _long_address(address)
    if not device.exists():
        return Fact(None, f"sysfs has no PCI device {address}")
    node = _numa_node_of(root, device)
    return Fact(node) if node is not None else Fact(None, f"sysfs tells no NUMA node of GPU {address}")


def _numa_node_of_any(root: Path, devices: list[Path] | None, kind: str) -> Fact:
    """The NUMA node of a device of which we do not know which one it is: known if all have the same."""
    if not devices:
        return Fact(None, f"sysfs shows no {kind}")
    homes = {_numa_node_of(root, device) for device in devices}
    nodes = sorted(node for node in homes if node is not None)
    if len(nodes) == len(homes) == 1:
        return Fact(nodes[0])
    if not nodes:
        return Fact(None, f"sysfs tells the NUMA node of no {kind}")
    where = f"NUMA nodes {_words(nodes)}" + (" and unknown ones" if None in homes else "")
    return Fact(None, f"{len(devices)} {kind}s on {where}, and which one this rank uses is not known")


def _numa_node_of(root: Path, device: Path) -> int | None:
    """From the device or the nearest one above it that tells (a virtio device sits below its PCI device)."""
    top, path = root.resolve(), device.resolve()
    while path != top and path != path.parent:
        text = _text(path / "numa_node")
        if text is not None:
            return int(text) if text.isdecimal() else None  # -1: the firmware does not say
        path = path.parent
    return None


def _long_address(address: str) -> str:
    """As sysfs spells it: nvidia-smi writes the domain with eight digits and capitals."""
    parts = re.fullmatch(r"(?:0*([0-9a-f]{4,}):)?([0-9a-f]{2}:[0-9a-f]{2}\.[0-7])", address.strip().lower())
    if parts is None:
        raise ValueError(f'gpu must be a PCI address such as "0000:17:00.0", got {address!r}')
    return f"{parts[1] or '0000'}:{parts[2]}"


def _listed(folder: Path) -> list[Path] | None:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return None


def _text(file: Path) -> str | None:
    try:
        return file.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _words(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))
