"""How well do predicted times of all-reduces agree with measured ones, on links that are really limited.

Four hosts (network namespaces) on links of a limited rate run gloo. A link's latency and bandwidth are fitted
to rings of all sizes, and to recursive doubling of the largest how much slower two-way messages are.
Then every algorithm at every size is predicted and measured: gloo's own all-reduce, and the rounds of ring,
recursive doubling, halving-doubling, tree and a hierarchy of two racks, sent message by message. At last
gloo's all-reduce is measured again while each host reads data over the same link.
Needs root, ip and tc (see netlab.sh).
"""

from __future__ import annotations

import socket
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.table import Table
from torch import distributed

from benchmarks.lab.network import Lab, lab, on_hosts, why_not
from benchmarks.report import save_figures
from dataflow.tools.estimate.cluster import Cluster, Link, Round
from dataflow.tools.estimate.collectives import all_reduces
from dataflow.tools.estimate.measure import fit, ring_point, time_all_reduce

LIMIT_S = 600.0
SIZES = (1 << 12, 1 << 16, 1 << 19, 1 << 21, 1 << 23)
LARGE = 1 << 19
GLOO = "gloo's all_reduce"
DOUBLING = "recursive doubling"
PORT, DATA_PORT = 29_500, 29_501


# ---- in a host ------------------------------------------------------------------------------------------


def run_rounds(rounds: list[Round], rank: int) -> None:
    """Send and receive this rank's messages, round after round."""
    for each in rounds:
        peers = list(zip(each.source.tolist(), each.target.tolist(), strict=True))
        size = max(1, round(each.nbytes))
        buffers = {peer: torch.empty(size, dtype=torch.uint8) for peer in peers if rank in peer}
        for _ in range(each.repeats):
            works: list[Any] = []
            for (source, target), buffer in buffers.items():
                if source == rank:
                    works.append(distributed.isend(buffer, target))
                else:
                    works.append(distributed.irecv(buffer, source))
            for work in works:
                work.wait()


def time_rounds(rounds: list[Round], rank: int, repeats: int) -> float:
    """Median seconds, of the slowest rank."""
    took = []
    for _ in range(repeats + 1):
        distributed.barrier()
        began = time.perf_counter()
        run_rounds(rounds, rank)
        took.append(time.perf_counter() - began)
    slowest = torch.tensor(took[1:], dtype=torch.float64)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


@contextmanager
def data_flow(address: str, bytes_per_s: float) -> Iterator[None]:
    """Read data at a rate over this host's link meanwhile."""
    done = threading.Event()
    with socket.create_connection((address, DATA_PORT), timeout=10) as stream:
        stream.sendall(f"{bytes_per_s}\n".encode())
        reader = threading.Thread(target=_drain, args=(stream, done))
        reader.start()
        try:
            yield
        finally:
            done.set()
            stream.shutdown(socket.SHUT_RDWR)
            reader.join()


def _drain(stream: socket.socket, done: threading.Event) -> None:
    with suppress(OSError):  # the other end may close first
        while not done.is_set() and stream.recv(1 << 18):
            pass


def _cluster(ranks: int) -> Cluster:
    """The lab as two racks, whose uplinks never limit, of one-rank nodes."""
    link = Link(1e-4, 1e8)
    return Cluster.regular(ranks, 1, 2 if ranks % 2 == 0 else 1, within=link, network=link)


def rank(place: list[int], address: str, repeats: int, mbit: float, server: str) -> dict[str, Any]:
    """All measurements of one rank, of a place among ranks. Runs in a process of its own."""
    me, ranks = place
    init = f"tcp://{address}:{PORT}"
    distributed.init_process_group("gloo", init_method=init, rank=me, world_size=ranks)
    found: dict[str, Any] = {"alone": {}, "with data": {}}
    for rounds in all_reduces(_cluster(ranks), 64).values():
        run_rounds(list(rounds), me)  # connections are made when first used
    for nbytes in SIZES:
        rows = {GLOO: time_all_reduce(nbytes, repeats=repeats)}
        for name, rounds in all_reduces(_cluster(ranks), nbytes).items():
            rows[name] = time_rounds(list(rounds), me, repeats)
        found["alone"][nbytes] = rows
    for share in (0.25, 0.5):
        with data_flow(server, share * mbit * 1e6 / 8):
            time_all_reduce(SIZES[-1], repeats=1)
            found["with data"][share] = time_all_reduce(SIZES[-1], repeats=repeats)
    distributed.destroy_process_group()
    return found


# ---- outside --------------------------------------------------------------------------------------------


@contextmanager
def data_server(hosts: Lab) -> Iterator[str]:
    """Sends zeros at the rate each client asks for; paced, the link does not limit it."""
    address = f"10.{hosts.number}.0.254"  # of the bridge
    with socket.create_server((address, DATA_PORT)) as server:
        threads: list[threading.Thread] = []
        accepting = threading.Thread(target=_accept, args=(server, threads))
        accepting.start()
        try:
            yield address
        finally:
            server.shutdown(socket.SHUT_RDWR)
            accepting.join()
            for thread in threads:
                thread.join()


def _accept(server: socket.socket, threads: list[threading.Thread]) -> None:
    while True:
        try:
            stream, _ = server.accept()
        except OSError:
            return
        threads.append(threading.Thread(target=_send, args=(stream,)))
        threads[-1].start()


def _send(stream: socket.socket) -> None:
    piece = bytes(16 << 10)
    with stream:
        rate = float(stream.makefile().readline())
        began, sent = time.monotonic(), 0
        try:
            while True:
                stream.sendall(piece)
                sent += len(piece)
                time.sleep(max(0.0, began + sent / rate - time.monotonic()))
        except OSError:
            return


def measure(num_hosts: int, mbit: float, repeats: int) -> dict[str, Any]:
    """Run all hosts; what rank 0 found."""
    with lab([f"{mbit:g}mbit"] * num_hosts) as hosts, data_server(hosts) as server:
        calls = [([host, num_hosts], hosts.address(0), repeats, mbit, server) for host in range(num_hosts)]
        return dict(on_hosts(hosts, calls, rank, limit_s=LIMIT_S))


def compare(found: dict[str, Any], hosts: int, mbit: float) -> dict[str, Any]:
    """Fit, predict, and tell the errors."""
    points = [ring_point(hosts, n, found["alone"][str(n)]["ring"]) for n in SIZES]
    gloo = [ring_point(hosts, n, found["alone"][str(n)][GLOO]) for n in SIZES]
    fits = {"messages": fit(points), GLOO: fit(gloo)}
    one_way = fits["messages"].link
    ideal = Cluster.regular(hosts, 1, 1, within=one_way, network=one_way)
    largest = found["alone"][str(SIZES[-1])][DOUBLING]
    slower = max(1.0, largest / ideal.seconds(all_reduces(ideal, SIZES[-1])[DOUBLING]))
    links = {"messages": replace(one_way, both_ways=slower), GLOO: fits[GLOO].link}
    rows = []
    for nbytes in SIZES:
        rounds = dict(all_reduces(_cluster(hosts), nbytes))
        for name, measured in found["alone"][str(nbytes)].items():
            link = links[GLOO if name == GLOO else "messages"]
            cluster = Cluster.regular(hosts, 1, 1, within=link, network=link)
            predicted = cluster.seconds(rounds["ring" if name == GLOO else name])
            rows.append(
                {"algorithm": name, "bytes": nbytes, "measured_s": measured, "predicted_s": predicted}
            )
    with_data = []
    link = fits[GLOO].link
    cluster = Cluster.regular(hosts, 1, 1, within=link, network=link)
    ring = all_reduces(cluster, SIZES[-1])["ring"]
    for share, measured in found["with data"].items():
        predicted = cluster.seconds(ring, data_bytes_per_s=float(share) * mbit * 1e6 / 8)
        with_data.append({"data_share": float(share), "measured_s": measured, "predicted_s": predicted})
    for row in [*rows, *with_data]:
        row["error"] = row["predicted_s"] / row["measured_s"] - 1
    names = dict.fromkeys(str(row["algorithm"]) for row in rows)
    by_name = {
        name: statistics.median(abs(row["error"]) for row in rows if row["algorithm"] == name)
        for name in names
    }
    fitted = {(name, nbytes) for name in ("ring", GLOO) for nbytes in SIZES} | {(DOUBLING, SIZES[-1])}
    others = [row for row in rows if (row["algorithm"], row["bytes"]) not in fitted]
    small, large = (
        [abs(row["error"]) for row in others if (row["bytes"] >= LARGE) == wanted] for wanted in (False, True)
    )
    return {
        "hosts": hosts,
        "mbit": mbit,
        "links": {name: asdict(each) for name, each in links.items()},
        "rows": rows,
        "with_data": with_data,
        "median_error_of": by_name,
        "large_bytes": LARGE,
        "median_error_large": statistics.median(large),
        "worst_error_large": max(large),
        "median_error_small": statistics.median(small),
        "worst_error_small": max(small),
        "fastest_named_right": _named_right(rows),
    }


def _named_right(rows: list[dict[str, Any]]) -> str:
    """Of how many sizes the predicted fastest algorithm was the measured one, or within 5 % of it."""
    right = 0
    for nbytes in SIZES:
        own = [r for r in rows if r["bytes"] == nbytes and r["algorithm"] != GLOO]
        chosen = min(own, key=lambda r: float(r["predicted_s"]))
        right += chosen["measured_s"] <= 1.05 * min(r["measured_s"] for r in own)
    return f"{right} of {len(SIZES)}"


def show(result: dict[str, Any], console: Console) -> None:
    """Tables."""
    table = Table(title=f"{result['hosts']} hosts, {result['mbit']:g} Mbit/s", title_justify="left")
    for name in ("algorithm", "bytes", "measured ms", "predicted ms", "error"):
        table.add_column(name, justify="right")
    for row in result["rows"]:
        times = [f"{row[key] * 1e3:.2f}" for key in ("measured_s", "predicted_s")]
        table.add_row(row["algorithm"], f"{row['bytes']:,}", *times, f"{row['error']:+.0%}")
    for row in result["with_data"]:
        times = [f"{row[key] * 1e3:.2f}" for key in ("measured_s", "predicted_s")]
        table.add_row(
            f"{GLOO}, data {row['data_share']:.0%}", f"{SIZES[-1]:,}", *times, f"{row['error']:+.0%}"
        )
    console.print(table)
    console.print(
        f"not fitted to: from {LARGE:,} bytes on median error {result['median_error_large']:.0%}, worst "
        f"{result['worst_error_large']:.0%}; below {result['median_error_small']:.0%} and "
        f"{result['worst_error_small']:.0%}; the fastest algorithm was named right for "
        f"{result['fastest_named_right']} sizes"
    )


@click.command()
@click.option("--hosts", type=click.IntRange(min=2), default=4, show_default=True)
@click.option("--mbit", type=float, default=200.0, show_default=True, help="Rate of each link.")
@click.option("--repeats", type=click.IntRange(min=1), default=11, show_default=True)
@click.option("--json", "json_path", metavar="PATH")
def main(hosts: int, mbit: float, repeats: int, json_path: str | None) -> None:
    """Compare predicted with measured all-reduce times in a lab of rate-limited hosts."""
    if reason := why_not():
        raise click.ClickException(reason)
    result = compare(measure(hosts, mbit, repeats), hosts, mbit)
    show(result, Console())
    if json_path:
        save_figures(Path(json_path), **result)


if __name__ == "__main__":
    main()
