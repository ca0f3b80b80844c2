"""Attacks workers at random moments of loops over loaders, and tells what was wrong then and what was left.

    python tests/fuzz/workers.py --minutes 5 --seed 1
    python tests/fuzz/workers.py --case 1000017          one case again, with all that it writes

A case is drawn by its number: a kind of dataset, a way to start workers, how many, and an attack. It runs in
a process group of its own; 20 cases whose workers come from a server share one, as servers take long to start
(`--case` has it for itself). Each of its loops must deliver what it should, or end with the one error that
says what happened; a loop after the attack must be right; in the end no process, thread, descriptor or map of
shared memory may be there that was not before. A case that takes longer than two minutes hangs. Exit status 1
if something was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import os
import random
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset, default_collate, get_worker_info

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "kits"), str(TESTS.parent)]
_HANGS_S = 120.0
_LEFT_S = 30.0
"""After this time whatever is there stays."""
_LATEST_S = 0.5
"""From the beginning of a loop to the attack, at most."""
NUM_SAMPLES = 400
_WIDTH = 2000
"""Numbers in a sample, all the same."""
KINDS = "map", "map with collate_fn", "iterable", "shards", "shards with collate_fn", "mixture"
STARTS = {"default": 4, "fork": 2, "forkserver": 3, "by value": 3, "spawn": 1, "thread": 2}
"""How workers start, and how often."""
SERVERS = "forkserver", "by value", "spawn"
_SHARE = 20
"""So many cases of these share a process."""
SIGNALS = {name: getattr(signal, f"SIG{name}") for name in ("TERM", "HUP", "USR1", "USR2")}
KILLS = "kill one", "kill two", "kill all", "kill parents", "kill any", "kill and close"
ATTACKS = (
    *("none", *KILLS, *KILLS),
    *(f"{name} to all" for name in SIGNALS),
    *("stop one", "stop all", "close", "close in a thread", "drop", "raise", "interrupt"),
)
_RAW = "UnpicklingError", "EOFError", "ConnectionRefusedError", "Traceback", "Exception ignored", "SIGSEGV"
"""What nothing that is right writes."""


@dataclass(frozen=True)
class Case:
    """What is tried."""

    number: int
    kind: str
    start: str
    num_workers: int
    persistent: bool
    attack: str
    delay_s: float
    """From the first batch, or the loop's beginning, to the attack."""
    is_early: bool
    """The attack may come before the first batch."""
    item_s: float
    """A sample takes so long."""
    batches: int
    """After so many the loop is closed or left, where that is the attack."""

    @classmethod
    def drawn(cls, number: int) -> Case:
        """The case of a number."""
        rng = random.Random(number)
        start = rng.choices([*STARTS], [*STARTS.values()])[0]
        attacks = [one for one in ATTACKS if start != "thread" or not one.startswith(("kill", "stop one"))]
        return cls(
            number=number,
            kind=rng.choice(KINDS),
            start=start,
            num_workers=rng.choice([1, 2, 2, 5]),
            persistent=rng.random() < 0.4,
            attack=rng.choice(attacks),
            delay_s=rng.choice([0, rng.uniform(0, _LATEST_S), rng.uniform(0, _LATEST_S)]),
            is_early=rng.random() < 0.3,
            item_s=rng.choice([0, 0.0002, 0.001]),
            batches=rng.randrange(20),
        )

    @property
    def is_over_shards(self) -> bool:
        """Return whether builders are attacked."""
        return not self.kind.startswith(("map", "iterable"))


# ---- what loaders are made of ------------------------------------------------------------------------------


def sample_of(i: int, case: Case) -> torch.Tensor:
    """A sample that tells whether it is whole."""
    if case.item_s:
        time.sleep(case.item_s)
    if case.attack == "raise" and i == NUM_SAMPLES // 2:
        raise ValueError("this sample is marked")
    return torch.full((_WIDTH,), i)


class Squares(Dataset[torch.Tensor]):
    """A map-style dataset."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, i: int) -> torch.Tensor:
        return sample_of(i, self.case)


class Stream(IterableDataset[torch.Tensor]):
    """An iterable dataset that workers share."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for i in range(first, NUM_SAMPLES, step):
            yield sample_of(i, self.case)


def transformed(sample: Any, *, case: Case) -> dict[str, Any]:
    """A transform."""
    return {"x": sample_of(int(sample["cls"]), case)}


def collated(samples: list[Any]) -> Any:
    """A `collate_fn`."""
    return default_collate(samples)


def made_loader(case: Case, folder: str) -> Any:
    """The loader of a case."""
    from datasets_kit import make_ints_tar

    from dataflow import DataLoader, Mixture
    from prefetch.workers.starting import ByValueContext

    starts: dict[str, Any] = {"default": None, "thread": None, "by value": ByValueContext()}
    more: dict[str, Any] = {"num_workers": case.num_workers, "persistent_workers": case.persistent}
    if case.start == "thread":
        more["workers"] = "thread"
    else:
        more["multiprocessing_context"] = starts.get(case.start, case.start)
    if case.kind.endswith("collate_fn"):
        more["collate_fn"] = collated
    if case.kind == "iterable":
        return DataLoader(Stream(case), 4, **more)
    if not case.is_over_shards:
        return DataLoader(Squares(case), 4, **more)
    if case.start == "default":
        more["workers"] = "process"
    transform = partial(transformed, case=case)
    if case.kind != "mixture":
        return DataLoader(make_ints_tar(Path(folder), NUM_SAMPLES).open(transform=transform), 4, **more)
    halves = []
    for name in "ab":
        (Path(folder) / name).mkdir()
        halves.append(make_ints_tar(Path(folder) / name, NUM_SAMPLES // 2).open(transform=transform))
    return DataLoader(Mixture(halves), 4, **more)


def expected(case: Case) -> list[int]:
    """The samples of a loop, in their order where there is one."""
    if case.kind == "mixture":
        return [*range(NUM_SAMPLES // 2), *range(NUM_SAMPLES // 2)]
    return [*range(NUM_SAMPLES)]


# ---- the process of a case ---------------------------------------------------------------------------------


class Channel:
    """Lines to and from the attacker."""

    def __init__(self, reads: int, writes: int) -> None:
        self._reads, self._writes = reads, writes
        self.is_over = False
        """The attack is."""

    def tell(self, **what: Any) -> None:
        """Write a line."""
        os.write(self._writes, f"{json.dumps(what)}\n".encode())

    def wait(self) -> str:
        """Read a line; "" at the end: the attack is over, or the number of a case."""
        line = os.read(self._reads, 1 << 10)  # one at a time comes
        self.is_over = True
        return line.decode().strip()


def helpers() -> dict[str, list[int]]:
    """Processes that are no workers."""
    from prefetch.memory import lifetimes
    from prefetch.workers import pool, starting

    pools = [one for one in lifetimes._ours if isinstance(one, pool.WorkerPool)]
    templates = [one._template.pid for one in pools if one._template is not None]
    servers = [forkserver._forkserver._forkserver_pid, starting._server._forkserver_pid]
    trackers = [resource_tracker._resource_tracker._pid]
    return {"parents": [*templates, *filter(None, servers)], "trackers": [*filter(None, trackers)]}


def values_of(batch: Any) -> list[int]:
    """The samples of a batch. `AssertionError`: they are not whole."""
    rows = batch["x"] if isinstance(batch, dict) else batch
    assert rows.shape[1:] == (_WIDTH,), f"a batch of shape {tuple(rows.shape)}"
    assert bool((rows == rows[:, :1]).all()), "a batch is torn"
    return [int(x) for x in rows[:, 0]]


def looped(case: Case, loader: Any, channel: Channel, *, attacked: bool) -> tuple[list[int], list[Any]]:
    """Samples and errors of one loop."""
    samples: list[int] = []
    errors: list[Any] = []
    closer: threading.Thread | None = None
    batches: Any = None
    try:
        if attacked and case.is_early:
            channel.tell(begun=helpers())
        batches = iter(loader)
        for number in range(10 * NUM_SAMPLES):
            try:
                batch = next(batches)
            except StopIteration:
                break
            except (Exception, KeyboardInterrupt) as error:
                errors.append(error)
                if case.attack != "raise" or case.is_over_shards:
                    break
                continue
            samples += values_of(batch)
            if not attacked:
                continue
            if number == 0 and not case.is_early:
                channel.tell(begun=helpers())
            if number == case.batches:
                if case.attack == "drop":
                    break
                if case.attack in ("close", "kill and close"):
                    loader.close()
                if case.attack == "close in a thread":
                    closer = threading.Thread(target=loader.close)
                    closer.start()
    except (Exception, KeyboardInterrupt) as error:
        errors.append(error)
    del batches
    if closer is not None:
        closer.join()
    return samples, errors


def words(error: BaseException) -> str:
    """An error with all that it says."""
    return "".join(traceback.format_exception(error)).strip()


def judged(
    case: Case, samples: Sequence[int], errors: Sequence[BaseException], *, attacked: bool
) -> list[str]:
    """What is wrong with a loop."""
    from prefetch.workers.deaths import WorkerDiedError

    wrong, whole = [], expected(case)
    allowed: Callable[[BaseException], bool] = lambda error: False  # noqa: E731
    if case.attack == "raise":
        allowed = lambda error: "this sample is marked" in str(error)  # noqa: E731
    elif attacked and case.attack == "kill and close":
        allowed = lambda error: isinstance(error, WorkerDiedError) or "closed" in str(error)  # noqa: E731
    elif attacked and case.attack.startswith("kill"):
        allowed = lambda error: (  # noqa: E731
            isinstance(error, WorkerDiedError) or "the fork server was killed" in str(error)
        )
    elif attacked and case.attack.startswith("close"):
        allowed = lambda error: isinstance(error, RuntimeError) and "closed" in str(error)  # noqa: E731
    elif attacked and case.attack == "interrupt":
        allowed = lambda error: isinstance(error, KeyboardInterrupt)  # noqa: E731
    wrong += [f"raised: {words(error)}" for error in errors if not allowed(error)]
    if case.attack == "raise":
        marks = whole.count(NUM_SAMPLES // 2)
        wrong += [] if len(errors) == marks else [f"{len(errors)} errors"]
    left = attacked and case.attack in ("drop", "close", "close in a thread", "kill and close")
    some, all_of_them = Counter(samples), Counter(whole)
    if some - all_of_them:
        wrong.append(f"samples that should not be: {sorted((some - all_of_them).elements())[:9]}")
    elif not errors and not left and some != all_of_them:
        wrong.append(f"{sum((all_of_them - some).values())} samples are missing")
    ordered = case.kind not in ("iterable", "mixture") and case.attack != "raise"
    if ordered and list(samples) != whole[: len(samples)]:
        wrong.append("samples are out of order")
    return wrong


def run_case(case: Case, channel: Channel, folder: str) -> list[str]:
    """Run a case, in its process; what was wrong."""
    from worker_kit import holdings

    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(_HANGS_S - 5)
    noted: list[int] = []
    channel.is_over = False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in SIGNALS.values():
        signal.signal(number, lambda number, _: noted.append(number))
    if case.start in SERVERS:  # they stay
        quiet = replace(case, kind="map", attack="none", persistent=False, num_workers=1, item_s=0)
        for _ in made_loader(quiet, folder):
            break
        del _
        gc.collect()
    seen: list[Any] = []
    before = holdings()
    loader, wrong = made_loader(case, folder), []
    try:
        for attempt in range(2):
            result = looped(case, loader, channel, attacked=attempt == 0)
            if attempt == 0:
                signal.signal(signal.SIGINT, lambda *_: noted.append(signal.SIGINT))
                channel.tell(looped=helpers())
                channel.wait()
                signal.signal(signal.SIGINT, signal.default_int_handler)
            elif case.attack == "interrupt" and not (
                noted or any(isinstance(e, KeyboardInterrupt) for e in seen)
            ):
                wrong.append("no KeyboardInterrupt")
            late = attempt == 1 and case.attack.startswith(("kill", "close", "interrupt")) and case.persistent
            seen = result[1]
            about = "in the loop attacked" if attempt == 0 else "in the next loop"
            if late and seen and all("exited unexpectedly" in str(error) for error in seen):
                # Killed between two loops: the second one hears of it, a third one must be right.
                seen = []
                result = looped(case, loader, channel, attacked=False)
            wrong += [f"{about}: {what}" for what in judged(case, *result, attacked=attempt == 0)]
            del result
    except KeyboardInterrupt:  # it came between: it did come
        if case.attack != "interrupt":
            raise
        if not channel.is_over:
            channel.wait()
    if case.attack.endswith("to all") and not noted:
        wrong.append("the training process was not told")
    seen = []
    loader.close()
    del loader
    wrong += left_since(before, holdings)
    faulthandler.cancel_dump_traceback_later()
    return wrong


def left_since(before: dict[str, Counter[Any]], holdings: Callable[[], dict[str, Counter[Any]]]) -> list[str]:
    """What is there after some time that was not before."""
    deadline = time.monotonic() + _LEFT_S
    while True:
        gc.collect()
        after = holdings()
        left = [
            f"left: {name} {after[name]}, before {before[name]}"
            for name in before
            if after[name] - before[name]
        ]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)


# ---- the attacker ------------------------------------------------------------------------------------------


def descendants(pid: int) -> list[int]:
    """Processes below one, the eldest first."""
    found, new = [], [pid]
    while new:
        children = []
        for parent in new:
            for tasks in Path(f"/proc/{parent}/task").glob("*/children"):
                with contextlib.suppress(OSError):
                    children += map(int, tasks.read_text().split())
        found += children
        new = children
    return sorted(found)


def sent(number: int, *pids: int) -> None:
    """Send a signal."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def strike(case: Case, pid: int, known: dict[str, list[int]]) -> None:
    """Attack the process of a case, or those below it."""
    rng = random.Random(case.number + 1)
    time.sleep(case.delay_s)
    alive = [one for one in descendants(pid) if one not in known["trackers"]]
    workers = [one for one in alive if one not in known["parents"]] or alive
    attack = case.attack
    if attack.endswith("to all"):
        os.killpg(pid, SIGNALS[attack.split()[0]])
    elif attack == "interrupt":
        os.killpg(pid, signal.SIGINT)
    elif attack == "stop all":
        os.killpg(pid, signal.SIGSTOP)
        time.sleep(rng.uniform(0, 1))
        os.killpg(pid, signal.SIGCONT)
    elif not workers:
        return
    elif attack == "stop one":
        victim = rng.choice(alive)
        sent(signal.SIGSTOP, victim)
        time.sleep(rng.uniform(0, 1))
        sent(signal.SIGCONT, victim)
    elif attack in ("kill one", "kill and close"):
        sent(signal.SIGKILL, rng.choice(workers))
    elif attack == "kill any":
        sent(signal.SIGKILL, rng.choice(alive))
    elif attack == "kill two":
        sent(signal.SIGKILL, rng.choice(workers))
        time.sleep(rng.choice([0, rng.uniform(0, 2)]))
        later = [one for one in descendants(pid) if one not in (*known["trackers"], *known["parents"])]
        sent(signal.SIGKILL, *rng.sample(later, min(1, len(later))))
    elif attack == "kill all":
        sent(signal.SIGKILL, *workers)
    elif attack == "kill parents":
        sent(signal.SIGKILL, *(one for one in alive if one in known["parents"]))
        time.sleep(rng.choice([0, rng.uniform(0, 0.3)]))
        later = [one for one in descendants(pid) if one not in known["trackers"]]
        if case.is_over_shards:  # one is to be replaced
            sent(signal.SIGKILL, *rng.sample(later, min(1, len(later))))


def lines_of(descriptor: int, until: float) -> Iterator[dict[str, Any]]:
    """Lines as they come. `TimeoutError`: it took too long."""
    text = b""
    while True:
        if not select.select([descriptor], [], [], max(0.0, until - time.monotonic()))[0]:
            raise TimeoutError
        more = os.read(descriptor, 1 << 16)
        if not more:
            return
        *whole, text = (text + more).split(b"\n")
        yield from map(json.loads, whole)


_pipes = set[int]()
"""The attacker's ends."""


class Host:
    """A process that runs cases, and its group."""

    def __init__(self, folder: Path) -> None:
        self.log, self.num_cases = folder / "log", 0
        reads, tells = os.pipe()
        told, says = os.pipe()
        self._reads, self._says = reads, says
        _pipes.update((reads, says))
        self.log.write_text("")
        self.pid = os.fork()
        if not self.pid:
            _serve(Channel(told, tells), folder, self.log)
        os.close(tells)
        os.close(told)

    def tried(self, case: Case) -> list[str]:
        """Run a case, and attack it; what was wrong."""
        self.num_cases += 1
        os.truncate(self.log, 0)
        wrong, begun = ["it ended without a word"], False
        with contextlib.suppress(BrokenPipeError):
            os.write(self._says, f"{case.number}\n".encode())
            try:
                for line in lines_of(self._reads, time.monotonic() + _HANGS_S):
                    known = line.get("begun") or line.get("looped")
                    if known and not begun:  # not yet, where an error came before the first batch
                        begun = True
                        strike(case, self.pid, known)
                        os.write(self._says, b"struck\n")
                    elif "wrong" in line:
                        wrong = line["wrong"]
                        break
            except TimeoutError:
                wrong = ["it hangs", *map(_standing, [self.pid, *descendants(self.pid)])]
        written = self.log.read_text(errors="replace")
        return wrong + [f"wrote {word}" for word in _RAW if word in written]

    def close(self) -> list[str]:
        """End it; what was left."""
        for fd in (self._says, self._reads):
            _pipes.discard(fd)
            os.close(fd)
        return _ended(self.pid)


def _serve(channel: Channel, folder: Path, log: Path) -> None:
    code = 7
    try:
        os.setsid()
        for fd in _pipes:
            os.close(fd)
        output = os.open(log, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
        os.environ["DATAFLOW_LIVE"] = "0"  # a page stays open as long as a process lives
        while number := channel.wait():
            with tempfile.TemporaryDirectory() as shards:
                channel.tell(wrong=run_case(Case.drawn(int(number)), channel, shards))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _standing(pid: int) -> str:
    try:
        folder = Path(f"/proc/{pid}")
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        return (
            f"{pid}: state {state}, {(folder / 'wchan').read_text()}, {(folder / 'syscall').read_text()[:60]}"
        )
    except OSError as error:
        return f"{pid}: {error}"


def _group(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def _ended(pid: int) -> list[str]:
    """Wait for the end of a group; what is left is ended."""
    deadline = time.monotonic() + _LEFT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        try:
            os.killpg(pid, 0)
        except ProcessLookupError:
            return []
        time.sleep(0.002)
    left = [
        _standing(one) for one in map(int, filter(str.isdigit, os.listdir("/proc"))) if _group(one) == pid
    ]
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)
    return ["processes are left at its end", *left]


def main() -> int:
    """Attack, and print what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=5.0, help="how long (default: 5)")
    parser.add_argument("--rounds", type=int, default=10**9, help="how many cases at most")
    parser.add_argument(
        "--seed", type=int, default=0, help="the first case is a million times that (default: 0)"
    )
    parser.add_argument("--case", type=int, help="try this one only")
    for name, what in (("attack", ATTACKS), ("start", STARTS), ("kind", KINDS)):
        parser.add_argument(
            f"--{name}", choices=[*dict.fromkeys(what)], help=f"try only cases of this {name}"
        )
    given = parser.parse_args()
    import dataflow.processes.builders
    import dataflow.stream.loader
    import dataflow.workers.process_main  # noqa: F401

    torch.set_num_threads(1)  # a pool of threads would be forked with this process
    numbers = [given.case] if given.case is not None else range(given.seed * 10**6, (given.seed + 1) * 10**6)
    ends, tries, failures = time.monotonic() + 60 * given.minutes, Counter[str](), 0
    slowest = (0.0, -1)
    hosts: dict[str, Host] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in map(Case.drawn, numbers):
            if time.monotonic() > ends or tries.total() >= given.rounds:
                break
            if any(
                getattr(given, name) not in (None, getattr(case, name))
                for name in ("attack", "start", "kind")
            ):
                continue
            tries[case.attack] += 1
            began = time.monotonic()
            if case.start not in hosts:
                (Path(folder) / case.start).mkdir(exist_ok=True)
                hosts[case.start] = Host(Path(folder) / case.start)
            host = hosts[case.start]
            wrong = host.tried(case)
            if wrong or case.start not in SERVERS or host.num_cases == _SHARE:
                wrong += hosts.pop(case.start).close()
            slowest = max(slowest, (time.monotonic() - began, case.number))
            if wrong:
                failures += 1
                text = "\n    ".join("\n".join(wrong).splitlines())
                print(f"case {case.number}: {asdict(case)}\n    {text}", flush=True)
            if wrong or given.case is not None:
                lines = host.log.read_text(errors="replace").splitlines()[-60:]
                print("    | " + "\n    | ".join(lines), flush=True)
        for host in hosts.values():
            failures += bool(left := host.close())
            print(*left)
    for attack, count in sorted(tries.items()):
        print(f"{attack:20} {count}")
    print(
        f"{tries.total()} cases, {failures} failures; the slowest took {slowest[0]:.1f} s, case {slowest[1]}"
    )
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
