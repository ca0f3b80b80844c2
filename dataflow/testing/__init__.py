"""Tests of code that runs on several ranks: real gloo processes, and what a rank raised.

`run_ranks(fn, world_size)` runs a function in each of so many processes and returns what each returned. The
marker `@pytest.mark.ranks(n)` of `dataflow.pytest_plugin` does that with the body of a test. Read `ranks`
first, then `rank_process`, which is what runs in the processes.
"""

from dataflow.testing.ranks import RankError as RankError, StartMethod as StartMethod, run_ranks as run_ranks

__all__ = ["RankError", "StartMethod", "run_ranks"]
