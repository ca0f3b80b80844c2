"""Hosts on links of limited rate, as network namespaces of this machine: `benchmarks/lab/netlab.sh`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import REPOSITORY
from benchmarks.runner import call_command, result_of

_SCRIPT = ["bash", str(REPOSITORY / "benchmarks" / "lab" / "netlab.sh")]
TCP = "cubic"
"""How its hosts control congestion: as most servers do."""
NUMBER = 78
TRIAL = 79
"""Numbers of labs. What has the number already is removed first: two at a time need two numbers."""


@dataclass(frozen=True)
class Lab:
    """Its hosts are numbered from 0."""

    number: int

    def inside(self, host: int) -> list[str]:
        """What to put before a command that shall run in this host."""
        # Said by an argument: whoever starts the command need not know the lab.
        return ["env", f"LAB={self.number}", *_SCRIPT, "exec", str(host)]

    def address(self, host: int) -> str:
        return f"10.{self.number}.0.{host + 1}"

    @property
    def outside(self) -> str:
        """The address of whoever built the lab, whose own link has no limit."""
        return f"10.{self.number}.0.254"

    def tcp(self, host: int) -> dict[str, int]:
        """Counts of the host's TCP so far: `OutSegs`, `RetransSegs` and others."""
        text = _run([*self.inside(host), "cat", "/proc/net/snmp"])
        names, values = (line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:"))
        return dict(zip(names, map(int, values), strict=True))

    def received(self, host: int) -> int:
        """Bytes that its link has brought the host, headers included."""
        # What the bridge's end of a link sends; read here, in no process of its own.
        return self._bytes(host, "tx_bytes")

    def sent(self, host: int) -> int:
        """Bytes that the host has put on its link, headers included."""
        return self._bytes(host, "rx_bytes")

    def _bytes(self, host: int, counter: str) -> int:
        return int(Path(f"/sys/class/net/nlab{self.number}v{host}/statistics/{counter}").read_text())


def why_not(trial: int = TRIAL) -> str | None:
    """Why no lab can be built here; None if one can. It is tried with this number."""
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"{' and '.join(missing)} missing (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    try:
        with lab(["1mbit"], trial):
            return None
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be built here: {error.stderr.strip() or error}"


@contextmanager
def lab(rates: Sequence[str], number: int = NUMBER) -> Iterator[Lab]:
    """Hosts with links of these rates, as `tc` takes them ("200mbit"), removed at the end."""
    given = {**os.environ, "LAB": str(number)}
    try:
        _run([*_SCRIPT, "up", str(len(rates)), rates[0]], given)
        for host, rate in enumerate(rates):
            _run([*_SCRIPT, "rate", rate, str(host)], given)
            # By route: a namespace may not choose its default among all that the kernel has.
            route = ["ip", "route", "change", f"10.{number}.0.0/24", "dev", "eth0", "congctl", TCP]
            _run([*_SCRIPT, "exec", str(host), *route], given)
        yield Lab(number)
    finally:
        _run([*_SCRIPT, "down"], given)


def set_rates(hosts: Lab, rate: str) -> None:
    """Give all links another rate."""
    _run([*_SCRIPT, "rate", rate], {**os.environ, "LAB": str(hosts.number)})


def on_hosts(
    hosts: Lab, calls: Sequence[tuple[Any, ...]], function: Callable[..., Any], *, limit_s: float
) -> Any:
    """Call a module's function on hosts 0, 1, ... at once, with JSON arguments; what host 0's call gave."""
    with ExitStack() as stack:
        processes = []
        for host, arguments in enumerate(calls):
            process = subprocess.Popen(
                [*hosts.inside(host), *call_command(function, *arguments)],
                cwd=REPOSITORY,
                env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL if host else None,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            processes.append(process)
        told = [process.communicate(timeout=limit_s)[0] for process in processes]
    return result_of(told[0])


def _run(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
