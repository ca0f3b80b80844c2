"""Mixtures: whose turn it is, where several datasets are delivered as one.

In: weights, sizes of the sources (or lengths of their samples), a stop rule. Out: source and index of every
position, and back. Read `shares` first (the exact sequence of turns), then `weight_steps` (weights that were
set), `interleaving`, `token_turns` (shares of tokens) and `windows` (their orders joined).
"""
