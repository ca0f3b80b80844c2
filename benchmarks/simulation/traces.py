"""The traces that the adaptive controllers are judged on: stores and trainings that differ from each other.

Each is a function of a seed. Unless a trace says otherwise a batch is 4 requests of 2 MiB, a step takes 50 ms
(so training uses 168 MB/s), the first byte comes after 80 ms, the link carries 400 MB/s and the memory
limit is 1 GiB.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.simulation.store import Trace, Work

MIB = 1 << 20
GIB = 1 << 30
MB = 1e6
Array = NDArray[Any]


def _work(
    steps: int,
    rng: np.random.Generator,
    *,
    requests: int = 4,
    request_bytes: int = 2 * MIB,
    sizes: Array | None = None,
    latency: Callable[[tuple[int, int]], Array] | None = None,
    step_s: Array | float = 0.05,
    decode_s: float = 0.005,
) -> Work:
    shape = (steps, requests)
    if sizes is None:
        sizes = np.full(shape, request_bytes)
    drawn = latency(shape) if latency else rng.normal(0.08, 0.004, shape).clip(0.06)
    return Work(
        sizes.astype(int).tolist(),
        drawn.tolist(),
        (decode_s * rng.uniform(0.9, 1.1, steps)).tolist(),
        np.broadcast_to(step_s, steps).tolist(),
    )


def constant(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    return Trace("constant", "nothing changes", True, GIB, [_work(600, rng)], lambda _: 400 * MB)


def too_slow(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    work = _work(400, rng)
    return Trace(
        "too-slow", "the link carries two thirds of what training uses", True, GIB, [work], lambda _: 110 * MB
    )


def step(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    work = _work(800, rng)
    says = "the link falls to a quarter for 10 of every 30 s: 600, 150, 600 MB/s"
    return Trace("step", says, False, GIB, [work], lambda t: (150 if t % 30 > 20 else 600) * MB)


def sinusoid(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    says = "the link swings between 60 and 460 MB/s in 20 s"
    phase = rng.uniform(0, 2 * math.pi)
    return Trace(
        "sinusoid", says, False, GIB, [_work(1400, rng)],
        lambda t: (260 + 200 * math.sin(2 * math.pi * t / 20 + phase)) * MB,
    )  # fmt: skip


def bursts(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    steps = np.full(600, 0.025)
    steps[79::80] = 10.0
    says = "training takes 80 batches in 2 s, then none for 10 s"
    return Trace("bursts", says, False, GIB, [_work(600, rng, step_s=steps)], lambda _: 400 * MB)


def trickle(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    steps = np.tile(np.repeat([0.015, 0.3], [100, 40]), 8)
    says = "a store 0.5 s away with 40 MB/s; 100 steps that want 140 MB/s, then 40 that want 7; 64 MiB"
    work = _work(
        len(steps),
        rng,
        step_s=steps,
        request_bytes=MIB // 2,
        latency=lambda s: rng.normal(0.5, 0.02, s).clip(0.4),
    )
    return Trace("trickle", says, False, 64 * MIB, [work], lambda _: 40 * MB)


def accumulation(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    steps = np.full(600, 0.01)
    steps[29::30] = 1.21
    says = "30 batches in 0.3 s, then 1.2 s; 503 above 200 requests/s, training uses 80"
    work = _work(600, rng, step_s=steps)
    return Trace("accumulation", says, True, GIB, [work], lambda _: 800 * MB, request_rate=lambda _: 200.0)


def farther(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    latency = np.repeat([0.08, 0.24], [1200, 1200]).reshape(600, 4)
    work = _work(600, rng, latency=lambda shape: latency * rng.uniform(0.9, 1.1, shape))
    return Trace(
        "farther", "latency triples after half of the batches", False, GIB, [work], lambda _: 200 * MB
    )


def log_normal(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    work = _work(1000, rng, latency=lambda shape: 0.06 * np.exp(rng.normal(0, 1, shape)))
    return Trace(
        "log-normal", "latency log-normal, median 60 ms, sigma 1", True, GIB, [work], lambda _: 400 * MB
    )


def pareto(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    work = _work(1000, rng, latency=lambda shape: 0.04 * (1 + rng.pareto(1.8, shape)))
    return Trace("pareto", "latency Pareto, from 40 ms, exponent 1.8", True, GIB, [work], lambda _: 400 * MB)


def storms(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    says = "503 above 200 requests/s, and above 60 for 5 of every 20 s; training uses 80"
    return Trace(
        "storms", says, False, GIB, [_work(600, rng)], lambda _: 800 * MB,
        request_rate=lambda t: 60.0 if t % 20 > 15 else 200.0,
    )  # fmt: skip


def _eight_ranks(seed: int, name: str, link: float) -> Trace:
    rng = np.random.default_rng(seed)
    works = [_work(250, rng, step_s=0.1) for _ in range(7)] + [_work(500, rng, step_s=0.05)]
    says = f"8 ranks, one with twice the demand, want 755 MB/s in all of a link with {link:.0f}"
    return Trace(name, says, True, GIB // 4, works, lambda _: link * MB)


def ranks(seed: int) -> Trace:
    return _eight_ranks(seed, "ranks", 800)


def ranks_short(seed: int) -> Trace:
    return _eight_ranks(seed, "ranks-short", 650)


def zipf(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    sizes = (50e3 * rng.zipf(1.5, (600, 4)).clip(1, 2800)).clip(50e3, 140e6)
    mean = float(sizes.mean()) * 4
    work = _work(600, rng, sizes=sizes, step_s=mean / (200 * MB))
    return Trace("zipf", "samples of 50 KB to 140 MB, Zipf 1.5", True, GIB, [work], lambda _: 400 * MB)


def pauses(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    steps = 0.05 * rng.lognormal(0, 0.4, 700)
    steps[199::200] = 60.0
    says = "steps jitter (sigma 0.4), and every 200th is a checkpoint of 60 s"
    return Trace("pauses", says, False, GIB, [_work(700, rng, step_s=steps)], lambda _: 250 * MB)


def cold_ramp(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    says = "a bucket that warms up: 40 MB/s, doubled every 4 s up to 400"
    return Trace(
        "cold-ramp", says, False, GIB, [_work(700, rng)], lambda t: min(400.0, 40 * 2 ** (t / 4)) * MB
    )


def decode_bound(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    work = _work(400, rng, decode_s=0.3)
    return Trace(
        "decode-bound",
        "4 decoders need 75 ms a batch, training 50",
        True,
        GIB,
        [work],
        lambda _: 400 * MB,
        decoders=4,
    )


def two_batches(seed: int) -> Trace:
    rng = np.random.default_rng(seed)
    work = _work(400, rng)
    return Trace("two-batches", "memory for two batches only", True, 16 * MIB, [work], lambda _: 400 * MB)


TRACES: dict[str, Callable[[int], Trace]] = {
    "constant": constant,
    "too-slow": too_slow,
    "step": step,
    "sinusoid": sinusoid,
    "bursts": bursts,
    "trickle": trickle,
    "accumulation": accumulation,
    "farther": farther,
    "log-normal": log_normal,
    "pareto": pareto,
    "storms": storms,
    "ranks": ranks,
    "ranks-short": ranks_short,
    "zipf": zipf,
    "pauses": pauses,
    "cold-ramp": cold_ramp,
    "decode-bound": decode_bound,
    "two-batches": two_batches,
}
"""By name."""

INFLIGHTS = [1 << k for k in range(20, 31)]
"""1 MiB to 1 GiB."""
DEPTHS = range(1, 65)
