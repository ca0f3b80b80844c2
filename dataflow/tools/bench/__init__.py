"""`dataflow bench`: how fast a store, a loader and its stages are, and which of them limits a run.

In: a dataset, sweeps. Out: tables and JSON with evidence of what was measured.
Read `settings` first, then `storage`, `loader` and `compare`; `telemetry.timing.bottleneck` says what limits.
"""
