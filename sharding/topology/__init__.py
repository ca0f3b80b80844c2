"""Describe this process: its rank, its machine, and what lies around it.

In: the launcher's environment, sysfs, what other ranks told. Out: a `Topology`, a frozen value.
Read `topology` first; `launchers`, `hardware` and `rank_facts` find its parts.
"""
