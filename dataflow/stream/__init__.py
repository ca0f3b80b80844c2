"""The loader over shards: who builds what, when, and where a run stands.

In: a dataset, settings, a position, plans (`dataflow.planning`). Out: batches of one rank, a state, stats.
Read `loader` first, then `decisions` and `resources` (threads and memory of a loop), and `stream` (windows).
"""
