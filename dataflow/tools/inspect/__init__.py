"""`dataflow inspect`: how well a shuffle mixes, and what it costs to read.

In: a catalog, a plan. Out: figures of the plan beside those of a full shuffle.
Read `command` first; `quality` measures mixing, `read_cost` reading.
"""
