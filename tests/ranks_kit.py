"""Ranks for tests: forked from a process that has torch imported, which takes a tenth of starting Python."""

from __future__ import annotations

import functools

from dataflow.testing import run_ranks

fast_ranks = functools.partial(run_ranks, start_method="forkserver")
