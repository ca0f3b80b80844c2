"""The loader over shards: who builds what, when, and where a run stands.

In: a dataset, settings, a position, plans (`dataflow.planning`). Out: batches of one rank, a state, stats.
Read `loader` first, then `session` (threads and memory of one loop) and `stream` (windows and chunks).
"""
