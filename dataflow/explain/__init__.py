"""Explain steps that were trained: which samples were in them, where these lie, and the batches again.

In: a loader, or its dataset and a state. Out: a table with a row for each sample or piece that was delivered.
Read `run` first (from a step to its place), then `dealt` (who got which positions) and `provenance`.
"""
