"""Side-by-side benchmarks: this project, its peers and the physical limit, on the same bytes in the same run.

`python -m benchmarks --help` says how to run them; `workloads` says what is measured and which bars apply.
"""
