"""Controllers of a schedule: what is tried while gradients keep ranks waiting, and kept if it pays.

In: times of windows. Out: a `Mode`: accumulation, compression, sync period, reads.
Read `controller` first (pure), then `knobs` (what may be changed) and `trial` (how it is judged).
"""
