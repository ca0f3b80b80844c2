"""Batches that depend on lengths: packed rows, token budgets, buckets.

In: the length of every sample, a rule. Out: units (rows or batches) and a `UnitPlan` that deals them to
ranks. Read `batching` (the rules as users give them) first, then `units`, `cutting`, `unit_plan`, and
`measuring` where lengths show only when samples are made.
"""
