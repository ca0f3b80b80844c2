"""`dataflow plan`: what a training run will cost on a cluster, before it runs.

In: a cluster, a link, a model's size. Out: seconds, money and energy of each choice.
Read `settings` first, then `plan` and `step`; `collectives` and `cluster` hold the arithmetic of links.
"""
