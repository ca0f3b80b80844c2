"""The public name of `dataflow.executors`, where everything is.

In: a call. Out: what `dataflow.executors` gives. Read `dataflow.executors` instead.
"""

from dataflow.executors import (
    ENGINES as ENGINES,
    EngineError as EngineError,
    TaskLostError as TaskLostError,
    engine as engine,
    run_all as run_all,
)
