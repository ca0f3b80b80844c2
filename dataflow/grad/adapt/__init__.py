"""The controller of a schedule: what is tried while gradients keep ranks waiting, and kept if it pays.

In: times of windows. Out: a `Mode`: accumulation, compression, sync period, reads.
Read `options` first (what may be changed, and how its options are compared), then `controller` (pure).
"""
