"""Where the time of training steps goes: phases, windows, reports with advice, traces.

In: clock reads of a schedule, or of a plain loop over a loader. Out: a `Report` of one rank or of all.
Read `phases` first, then `records` (kept by `steps` or `loops`) and `report`; `diagnosis` and `advice` say
what it means.
"""

VARIABLE = "DATAFLOW_DOCTOR"
"""The environment variable by which `dataflow doctor` asks for records: the folder where they go."""
