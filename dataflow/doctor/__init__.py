"""Where the time of training steps goes: reports, traces, `dataflow doctor`."""

VARIABLE = "DATAFLOW_DOCTOR"
"""The environment variable by which `dataflow doctor` asks for records: the folder where they go."""
