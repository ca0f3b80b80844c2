"""Timing of training steps: phases, windows, reports with advice, traces.

In: clock reads of a schedule, or of a plain loop over a loader. Out: a `Report` of one rank or of all.
Read `phases` first, then `records` (kept by `steps` or `loops`) and `report`; `shares` and `diagnosis` say
what it means. `loops` replays batches in a loader's place, `data_stall_report` says what that would gain,
`bottleneck` what measured rates of the parts say.
"""

VARIABLE = "DATAFLOW_DOCTOR"
"""The environment variable by which `dataflow doctor` asks for records: the folder where they go."""
ROUND = 10
"""Steps that headspace takes the mean of, before the median of these means."""
DEFAULT_STEPS = 5 * ROUND
"""Steps that headspace measures, with the loader and without it."""
