"""Other people's training loops over loaders of shards: what a loader cannot do by itself.

In: an object of a framework, as its user has set it up. Out: the same object, which keeps the loader's place.
Each module imports its framework, and nothing outside this folder imports it. Read `accelerate` first.
"""
