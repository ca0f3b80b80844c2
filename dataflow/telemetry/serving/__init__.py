"""Metrics over HTTP: every figure as an instrument, and the process that serves them.

In: the pages of this node's ranks. Out: Prometheus's text, health, JSON. Read `instruments` first, then
`endpoint`, and `serve`, which starts it.
"""
