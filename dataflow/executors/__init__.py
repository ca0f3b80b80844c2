"""Executors of the engines that people have: processes of this machine, Ray, Dask, Spark, Slurm and MPI.

In: tasks that may be done twice. Out: their results, as they are done. An engine's own package does the work:
what is here is started, asked whether it is there, given few tasks at a time, and asked again for those whose
worker died. Read `running` first, then `starting`; each other module is one engine.
"""

from dataflow.executors.errors import EngineError as EngineError, TaskLostError as TaskLostError
from dataflow.executors.running import run_all as run_all
from dataflow.executors.starting import ENGINES as ENGINES, engine as engine

__all__ = ["ENGINES", "EngineError", "TaskLostError", "engine", "run_all"]
