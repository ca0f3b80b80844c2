"""A job on a virtual clock whose modes the production controller chooses: what it sees, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dataflow.grad.adapt.controller import Controller, Measurement
from dataflow.grad.adapt.options import Tunable

COMPRESSION = Tunable("compression", ("all-reduce", "bf16", "int8"))
SENT = (1.0, 0.5, 0.27)
"""Bytes of each option, as a share of the gradients'."""
LAG = 1
"""Windows between the end of a window and the first one that it can act on."""


@dataclass(frozen=True)
class Job:
    """What a window takes: computing, and the gradients' way over a link, of which a part hides.

    Attributes:
        link: seconds that the gradients take at a window, uncompressed.
        compute_s: of a window at the slowest rank.
        hides_s: communication that the last backward pass covers.
        waits_s: what other ranks wait for the slowest one.
        windows: how many.
        codec_s: seconds a window that each option costs anyway.
        noise: standard deviation of a window's seconds, as a share.
        stationary: the link is the same all the time.
        bar: best fixed mode's seconds over the controller's, at least.
        most_changes: of the mode, as decided.
    """

    link: Callable[[int], float]
    compute_s: float = 0.2
    hides_s: float = 0.02
    waits_s: float = 0.0
    codec_s: tuple[float, ...] = (0.0, 0.005, 0.03)
    windows: int = 3000
    noise: float = 0.05
    stationary: bool = True
    bar: float = 0.9
    most_changes: int = 6

    def window(self, number: int, option: int, luck: float) -> tuple[float, float]:
        """Seconds, and exposed ones at the rank that waits least."""
        exposed = max(0.0, self.link(number) * SENT[option] - self.hides_s)
        return (self.compute_s + exposed + self.codec_s[option]) * luck, exposed * luck


def steady(seconds: float) -> Callable[[int], float]:
    return lambda window: seconds


def between(begin: int, end: int, inside: float, outside: float) -> Callable[[int], float]:
    return lambda window: inside if begin <= window < end else outside


def alternating(length: int, one: float, other: float) -> Callable[[int], float]:
    return lambda window: one if window // length % 2 == 0 else other


JOBS = {
    "compute-bound": Job(steady(0.02)),
    "codec costs what it saves": Job(steady(0.06), compute_s=0.3, codec_s=(0.0, 0.03, 0.05)),
    "saturated": Job(steady(0.5)),
    "saturated, noisy": Job(steady(0.5), noise=0.2),
    "halved is best": Job(steady(0.1), noise=0.03),
    "a slow rank": Job(steady(0.02), waits_s=0.3),
    "ten times too slow": Job(steady(4.0)),
    "link drops": Job(between(1000, 10**9, 0.6, 0.02), stationary=False),
    "link drops and recovers": Job(between(1000, 2000, 0.6, 0.02), stationary=False),
    "a burst": Job(between(1000, 1030, 1.0, 0.02), stationary=False),
    "slow alternation": Job(alternating(500, 0.02, 0.6), stationary=False),
    "fast alternation": Job(alternating(20, 0.02, 0.6), stationary=False),
    "alternation at the length of a trial": Job(alternating(60, 0.02, 0.6), stationary=False),
}


@dataclass
class Run:
    """What came of it."""

    seconds: float
    options: list[int] = field(default_factory=list)
    changes: int = 0
    reason: str = ""


def luck_of(job: Job, seed: int) -> Sequence[float]:
    """The same for every mode: windows that are longer by chance are so in each."""
    random = np.random.default_rng(seed)
    luck = np.maximum(0.5, random.normal(1.0, job.noise, job.windows))
    luck[random.random(job.windows) < 0.003] *= 8  # a checkpoint, an evaluation
    return luck.tolist()


def controlled(job: Job, controller: Controller, seed: int = 0) -> Run:
    run, told = Run(0.0), []
    for number, luck in enumerate(luck_of(job, seed)):
        if len(told) > LAG:
            controller.observe(told.pop(0))
        (option,) = controller.options(number)
        seconds, exposed = job.window(number, option, luck)
        told.append(Measurement(number, seconds + job.waits_s, exposed))
        run.seconds += seconds + job.waits_s
        run.options.append(option)
    run.changes, run.reason = controller.changes, controller.mode.reason
    return run


def fixed(job: Job, option: int, seed: int = 0) -> float:
    pairs = enumerate(luck_of(job, seed))
    return sum(job.window(number, option, luck)[0] + job.waits_s for number, luck in pairs)


def best_static(job: Job, seed: int = 0) -> tuple[int, float]:
    times = [fixed(job, option, seed) for option in range(len(SENT))]
    return times.index(min(times)), min(times)
