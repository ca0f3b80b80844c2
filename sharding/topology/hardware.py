"""Read this machine's NUMA nodes from Linux's sysfs.

A reading is a function of the files below `sysfs` (so a test gives it a folder) and of the CPUs that this
process may use. It never guesses: what the files do not tell is None, with the reason.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple


class Fact(NamedTuple):
    """A number, or None and why it is not known."""

    value: int | None
    why_unknown: str = ""


_NO_NODES = "sysfs has no devices/system/node"


def read_hardware(sysfs: str = "/sys", cpus: Iterable[int] | None = None) -> Mapping[str, Fact]:
    """The facts of a `Topology` that sysfs may tell, by name.

    Args:
        sysfs: where sysfs is mounted.
        cpus: CPUs that this process may use; None: ask the system.

    Missing or damaged files are no errors.
    """
    nodes = _cpus_of_numa_nodes(Path(sysfs))
    return {
        "numa_node": _numa_node_of_cpus(nodes, frozenset(os.sched_getaffinity(0) if cpus is None else cpus)),
        "num_numa_nodes": Fact(None, _NO_NODES) if nodes is None else Fact(len(nodes)),
    }


def cpu_list(text: str) -> frozenset[int]:
    """The CPUs of the kernel's list form, such as "0-3,8". Raises `ValueError` for anything else."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _cpus_of_numa_nodes(root: Path) -> dict[int, frozenset[int]] | None:
    """CPUs by NUMA node (none for a node that is memory only)."""
    nodes = {}
    for path in (root / "devices/system/node").glob("node*"):
        if number := re.fullmatch(r"node(\d+)", path.name):
            text = ""
            with suppress(OSError, UnicodeDecodeError):
                text = (path / "cpulist").read_text()
            try:
                nodes[int(number[1])] = cpu_list(text)
            except ValueError:
                return None
    return nodes or None


def _numa_node_of_cpus(nodes: Mapping[int, frozenset[int]] | None, cpus: frozenset[int]) -> Fact:
    if nodes is None:
        return Fact(None, _NO_NODES)
    homes = sorted(node for node, node_cpus in nodes.items() if node_cpus & cpus)
    if len(homes) == 1:
        return Fact(homes[0])
    if not homes:
        return Fact(None, "no NUMA node in sysfs has this process's CPUs")
    numbers = ", ".join(map(str, homes))
    return Fact(None, f"this process is not bound: it may use CPUs of NUMA nodes {numbers}")
