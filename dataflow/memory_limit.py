"""How much memory a loader may hold: what was asked for, or a share of the machine."""

from __future__ import annotations

import os

from sharding.plan.window_size import DEFAULT_LIMIT


def memory_limit_bytes(limit: int | str | None, local_world_size: int) -> int:
    """The limit in bytes; without one 1 GiB, or an eighth of the machine's memory per rank if less."""
    if limit is None:
        return max(64 << 20, min(DEFAULT_LIMIT, _machine_memory() // 8 // max(1, local_world_size)))
    if isinstance(limit, str):
        return parse_bytes(limit)
    if limit <= 0:
        raise ValueError(f"memory_limit must be > 0 bytes, got {limit}")
    return int(limit)


def parse_bytes(text: str) -> int:
    """Bytes of a size such as "512MB" or "2GiB": MB is 10**6, MiB is 2**20."""
    units = {"": 1, "b": 1}
    for power, letter in enumerate("kmgt", 1):
        units[letter] = units[letter + "b"] = 1000**power
        units[letter + "ib"] = 1024**power
    number = text.strip().lower().rstrip("bikmgt")
    unit = text.strip().lower()[len(number) :]
    try:
        return int(float(number) * units[unit])
    except (KeyError, ValueError):
        raise ValueError(f'a size must be like 1000000, "512MB" or "2GiB", got {text!r}') from None


def _machine_memory() -> int:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        with open("/sys/fs/cgroup/memory.max") as file:
            text = file.read().strip()
        return min(total, int(text)) if text != "max" else total
    except (OSError, ValueError):
        return total
