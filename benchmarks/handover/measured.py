"""What is measured of one loader in one case of `benchmarks.handover.compare`, in a process of its own.

Memory is sampled by the parent, and only where memory is the question, because reading page tables slows a
loader down.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.handover import feeds
from benchmarks.handover.loaders import LOADERS, How
from benchmarks.runner import Tell, forever

clock = time.perf_counter
Figures = dict[str, float]
STEP_S = 0.010
"""A training step on a device, in the epoch-turn case: the consumer sleeps."""
TURN_BATCHES, TURNS = 24, 3
HELD = 20
MODEL_S, LATER = 1.0, 3
"""A model is built for so long while the first loader waits; loaders that are made afterwards."""


@dataclass(frozen=True)
class Point:
    """One measurement: what is handed over, by whom, to whom."""

    case: str
    loader: str
    workers: int = 2
    variant: str = ""
    """Start method, "persistent" or "anew", number of tensors, or "delayed", by the case."""
    warmup_s: float = 0.5
    timed_s: float = 1.5


def measured(fields: dict[str, Any], tell: Tell) -> None:
    """Tell the figures of a point."""
    point = Point(**fields)
    importlib.import_module(LOADERS[point.loader].package)
    tell("done", **MEASURES[point.case](point, tell))


@contextlib.contextmanager
def loading(point: Point, feed: feeds.Feed, **how: Any) -> Iterator[Iterator[Any]]:
    """The batches of a new loader, epoch after epoch; the loader is closed in the end."""
    loader = LOADERS[point.loader].make(feed, How(point.workers, **how))
    batches = forever(loader)
    try:
        yield batches
    finally:
        batches.close()
        getattr(loader, "close", lambda: None)()
        del batches, loader
        gc.collect()


def checked(batch: Any, feed: feeds.Feed) -> None:
    if (got := feeds.described(batch)) != feed.delivers:
        raise RuntimeError(f"the loader delivers {got} instead of {feed.delivers}")


def touch(batch: Any) -> None:
    """Read the first and the last element of the first tensor."""
    flat = feeds.first_tensor(batch).view(-1)
    _ = flat[0].item(), flat[-1].item()


def consume(batches: Iterator[Any], seconds: float, use: Callable[[Any], Any]) -> tuple[int, float]:
    """Take batches until `seconds` have passed: (number, seconds)."""
    number, started = 0, clock()
    while clock() - started < seconds:
        use(next(batches))
        number += 1
    return number, clock() - started


class Processor:
    """CPU seconds from now on: those of this process and its workers, and those of everything else."""

    def __init__(self) -> None:
        self._own_s, self._all_s, self._at = *self._spent(), clock()

    def _spent(self) -> tuple[float, float]:
        from benchmarks.memory import machine_cpu_s, tree_cpu_s

        return tree_cpu_s(os.getpid()), machine_cpu_s()

    def spent(self) -> tuple[float, float]:
        """(own CPU seconds, cores that all others used on average); to be asked while the workers live."""
        elapsed_s = clock() - self._at
        own_s, all_s = self._spent()
        own_s, all_s = own_s - self._own_s, all_s - self._all_s
        return own_s, max(0.0, all_s - own_s) / elapsed_s


def rate_of(feed: feeds.Feed, point: Point, use: Callable[[Any], Any] = touch) -> dict[str, float]:
    with loading(point, feed) as batches:
        checked(next(batches), feed)
        consume(batches, point.warmup_s, use)
        processor = Processor()
        number, elapsed_s = consume(batches, point.timed_s, use)
        own_s, others = processor.spent()
    return {
        "batches_per_s": number / elapsed_s,
        "cpu_ms_per_batch": 1e3 * own_s / number,
        "others_cores": others,
    }


def large(point: Point, tell: Tell) -> Figures:
    return rate_of(feeds.images(), point)


def large_read(point: Point, tell: Tell) -> Figures:
    """The consumer reads every byte, as a copy to a device does."""
    target = torch.empty(64, *feeds.IMAGE, dtype=torch.uint8)
    return rate_of(feeds.images(), point, target.copy_)


def many(point: Point, tell: Tell) -> Figures:
    return rate_of(feeds.fields(200), point)


def scalars(point: Point, tell: Tell) -> Figures:
    return rate_of(feeds.scalars(), point)


def tiny(point: Point, tell: Tell) -> Figures:
    return rate_of(feeds.tokens(), point)


def delay(point: Point, tell: Tell) -> Figures:
    """Timed for twice as long: the question is one of a few percent."""
    longer = Point(point.case, point.loader, point.workers, "", point.warmup_s, 2 * point.timed_s)
    return rate_of(feeds.waits(delayed=point.variant == "delayed"), longer)


def startup(point: Point, tell: Tell) -> Figures:
    """From making the loader to its first batch, then the same with a second loader of the same process."""
    feed, taken_ms, others = feeds.scalars(), [], 0.0
    for _ in range(2):
        processor = Processor()
        started = clock()
        with loading(point, feed, start=point.variant) as batches:
            first = next(batches)
            taken_ms.append(1e3 * (clock() - started))
            others = max(others, processor.spent()[1])
            checked(first, feed)
            del first
    return {"first_batch_ms": taken_ms[0], "second_loader_ms": taken_ms[1], "others_cores": others}


def first(point: Point, tell: Tell) -> Figures:
    """From making the first loader of a process to its first batch, by what else goes on; then later loaders.

    The start method is each loader's own.
    """
    feed, stop = feeds.scalars(), threading.Event()
    if point.variant == "threads":
        threading.Thread(target=stop.wait).start()
    processor = Processor()
    try:
        took_ms, waited_ms = first_batch(point, feed, MODEL_S if point.variant == "model" else 0.0)
        _, others = processor.spent()
        later_ms = [first_batch(point, feed, 0.0)[0] for _ in range(LATER)]
    finally:
        stop.set()
    return {
        "from_making_ms": took_ms,
        "first_wait_ms": waited_ms,
        "later_loader_ms": statistics.median(later_ms),
        "others_cores": others,
    }


def first_batch(point: Point, feed: feeds.Feed, model_s: float) -> tuple[float, float]:
    """Milliseconds from making a loader to its first batch, and those of them that were waited for it."""
    started = clock()
    loader = LOADERS[point.loader].make(feed, How(point.workers, persistent=False))
    made = clock()
    while clock() < made + model_s:
        torch.nn.Linear(512, 512)
    asked = clock()
    batches = iter(loader)
    batch = next(batches)
    came = clock()
    checked(batch, feed)
    return 1e3 * (came - started), 1e3 * (came - asked + made - started)


def turn(point: Point, tell: Tell) -> Figures:
    """From asking for a batch after the last one of an epoch to having the first of the next."""
    feed, taken_ms = feeds.images(TURN_BATCHES), []
    processor = Processor()
    with loading(point, feed, persistent=point.variant == "persistent") as batches:
        for _ in range(TURNS + 1):
            started = clock()
            first = next(batches)
            taken_ms.append(1e3 * (clock() - started))
            checked(first, feed)
            del first  # the arena of spdl-subprocess stands still while an old batch is held
            for _ in range(TURN_BATCHES - 1):
                time.sleep(STEP_S)
                touch(next(batches))
            time.sleep(STEP_S)
        _, others = processor.spent()
    later = statistics.median(taken_ms[2:])
    return {"second_epoch_ms": taken_ms[1], "later_epochs_ms": later, "others_cores": others}


def descriptors(point: Point, tell: Tell) -> Figures:
    """Descriptors and shared-memory objects of this process while it holds 20 batches."""
    feed = feeds.fields(int(point.variant), held=HELD)
    fds_before, objects_before = len(os.listdir("/proc/self/fd")), shared_objects()
    with loading(point, feed) as batches:
        held = [next(batches) for _ in range(HELD)]
        fds, objects = len(os.listdir("/proc/self/fd")), shared_objects()
        checked(held[-1], feed)
        del held
    return {"descriptors": fds - fds_before, "shared_objects": len(objects - objects_before)}


def shared_objects() -> set[tuple[int, int]]:
    """(device, inode) of the shared memory that this process maps or holds open, semaphores left out."""
    found = set()
    with open("/proc/self/maps") as lines:
        for line in lines:
            _, _, _, device, inode, *path = line.split(maxsplit=5)
            if path and is_shared_memory(path[0]):
                major, minor = (int(part, 16) for part in device.split(":"))
                found.add((os.makedev(major, minor), int(inode)))
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        with contextlib.suppress(OSError):  # the descriptor of this very listing
            if is_shared_memory(os.readlink(path)):
                status = os.stat(path)
                found.add((status.st_dev, status.st_ino))
    return found


def is_shared_memory(path: str) -> bool:
    """Whether a path of /proc/self/maps is a POSIX or anonymous shared memory object."""
    in_folder = path.startswith("/dev/shm/") and not path.startswith("/dev/shm/sem.")
    return in_folder or path.startswith(("/memfd:", "/dev/zero"))


def memory(point: Point, tell: Tell) -> Figures:
    """The parent samples the memory of all processes from before the loader until the end."""
    feed = feeds.images()
    tell("loading")
    with loading(point, feed) as batches:
        consume(batches, point.warmup_s + point.timed_s, touch)
        tell("consumed")
    return {}


MEASURES: dict[str, Callable[[Point, Tell], Figures]] = {
    "large": large,
    "large-read": large_read,
    "many": many,
    "scalars": scalars,
    "tiny": tiny,
    "startup": startup,
    "first": first,
    "turn": turn,
    "descriptors": descriptors,
    "memory": memory,
    "delay": delay,
}
