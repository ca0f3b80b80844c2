"""Side-by-side benchmarks: this project, its peers and the physical limit, on the same bytes in the same run.

`python -m benchmarks --help` says how to run the workloads W1 to W5. Other questions have scripts of their
own in the folders; docs/notes/benchmarks.md lists them with what they found. `runner` is the process of every
measurement.
"""

from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
