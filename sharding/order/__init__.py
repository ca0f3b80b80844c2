"""Orders: a position in an epoch to a sample, as a pure function of seed and epoch.

In: samples of each block, `Shuffle`, seed, epoch. Out: an `Order` and the windows that it mixes samples in.
Read `shuffle` (the settings) first, then `order`; `permutations` has those that need no memory.
"""
