"""Limit what is in flight to what a store bears, for one rank or all of a machine.

In: sizes and times of reads, stalls. Out: a number with a reason; permission to read now.
Read `inflight` (the control as a value) first, then `gate` and `broker`; `depth` says how far ahead to build.
"""
