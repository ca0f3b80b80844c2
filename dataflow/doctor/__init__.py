"""Where the time of training steps goes: reports, traces, `dataflow doctor`."""
