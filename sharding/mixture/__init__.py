"""Mixtures: whose turn it is, where several datasets are delivered as one.

In: weights, sizes of the sources, a stop rule. Out: source and index of every position, and back.
Read `shares` first (the exact sequence of turns), then `interleaving`, then `windows` (their orders joined).
"""
