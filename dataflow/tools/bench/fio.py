"""Local reads around the page cache by `fio`, the field's own tool: what the device gives.

One process of fio has so many reads in flight (`libaio`), and writes each of them down. Figures are made of
these as of our own reads. The kernel counts what a process that has ended fetched as ours, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory

import numpy as np

from dataflow.tools.bench.reads import ALIGNMENT, Case, CaseTimes
from sharding.blocks import Shard
from sharding.catalog.storage import failure_text
from sharding.errors import DataflowError, ShardReadError
from sharding.urls import local_path

_LATE_S = 60.0
# Each file is held open: all descriptors that this user may have.
_COMMAND = "ulimit -Sn $(ulimit -Hn); exec fio --readonly --output-format=json -"
_JOB = """[case]
ioengine=libaio
direct=1
thread
allow_file_create=0
file_service_type={pattern}
rw={rw}
bs={case.block_bytes}
iodepth={case.concurrency}
runtime={seconds}
{end}
write_lat_log=reads
per_job_logs=0
disable_slat=1
disable_clat=1
"""


def why_no_fio(shards: Sequence[Shard], block_bytes: int) -> str:
    """Return why fio cannot read blocks of these shards; "": it can."""
    if shutil.which("fio") is None:
        return "fio is not installed (apt-get install fio, dnf install fio)"
    if all(shard.size < block_bytes for shard in shards):
        return f"every shard is shorter than a block of {block_bytes:,} bytes, which fio cannot read"
    return ""


def check_direct(shards: Sequence[Shard], open_file: Callable[[str, int], int] = os.open) -> None:
    """Raise `ShardReadError` for a shard that is missing or forbidden, or cannot be read directly."""
    for shard in shards:
        try:
            os.close(open_file(local_path(shard.url), os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECT))
        except PermissionError as error:
            raise ShardReadError(shard.url, failure_text(error), stage="read") from error
        except OSError as error:
            reason = f"cannot be read around the page cache ({error}); use --read buffered"
            raise ShardReadError(shard.url, reason, stage="read") from error


def run_fio(
    case: Case,
    shards: Sequence[Shard],
    seconds: float,
    *,
    reads: int | None = None,
    from_device: Callable[[], int | None],
) -> CaseTimes:
    """Have fio read local shards directly; those that are shorter than a block are left out.

    Args:
        case: what is asked.
        shards: what is read.
        seconds: when to stop.
        reads: stop after so many, too, or when all was read; None: read again what was read.
        from_device: bytes that this process, and what it has started, have caused to be fetched from storage.

    Raises:
        ValueError: blocks are no multiple of 4096 bytes.
        DataflowError: fio fails, or does not end.
    """
    if case.block_bytes % ALIGNMENT:
        raise ValueError(
            f"direct reads need blocks of a multiple of {ALIGNMENT} bytes, got {case.block_bytes}"
        )
    paths = [local_path(shard.url) for shard in shards if shard.size >= case.block_bytes]
    is_random = case.pattern == "random"
    job = _JOB.format(
        case=case,
        pattern=case.pattern,
        rw="randread" if is_random else "read",
        seconds=f"{1e6 * seconds:.0f}us",
        end="time_based" if reads is None else f"number_ios={reads}",
    )
    with TemporaryDirectory(prefix="dataflow-fio-") as folder:
        for number, path in enumerate(paths):  # fio has words and signs of its own in names
            os.symlink(os.path.abspath(path), os.path.join(folder, str(number)))
            job += f"filename={number}\n"
        before = from_device()
        try:
            ended = subprocess.run(
                ["sh", "-c", _COMMAND],
                cwd=folder,
                input=job,
                capture_output=True,
                text=True,
                timeout=seconds + _LATE_S,
            )
        except subprocess.TimeoutExpired:
            raise DataflowError(f"fio did not end within {seconds + _LATE_S:g} s: the device hangs") from None
        after = from_device()
        try:
            [figures] = json.loads(ended.stdout[ended.stdout.index("{") :])["jobs"]
            log = np.loadtxt(f"{folder}/reads_lat.log", np.int64, delimiter=",", usecols=(0, 1, 3), ndmin=2)
        except (OSError, ValueError, KeyError) as error:
            raise DataflowError(f"fio failed: {_complaint(ended) or error}; use --read buffered") from None
    if ended.returncode or not len(log):
        raise DataflowError(f"fio failed: {_complaint(ended) or 'it read nothing'}; use --read buffered")
    ended_s = log[:, 0] / 1e3
    return CaseTimes(
        began_s=ended_s - log[:, 1] / 1e9,
        ended_s=ended_s,
        nbytes=log[:, 2],
        cpu_s=(figures["usr_cpu"] + figures["sys_cpu"]) / 100 * figures["job_runtime"] / 1e3,
        device_bytes=None if before is None or after is None else after - before,
        exhausted=False,
    )


def _complaint(ended: subprocess.CompletedProcess[str]) -> str:
    """Return what fio says that is wrong."""
    lines = [line.strip() for line in (ended.stderr + ended.stdout).splitlines()]
    return next((line for line in lines if line.startswith(("fio:", "sh:"))), "")
