"""Mixtures: which source is drawn, where several datasets are delivered as one.

In: weights, sizes of the sources (or lengths of their samples), a stop rule. Out: source and index of every
position, and back. Read `shares` first (the exact sequence of draws), then `weight_steps` (weights that were
set), `interleaving`, `token_schedule` (shares of tokens) and `windows` (their orders joined); `inverse` tells
where samples of any order come.
"""
