"""The commands: `dataflow index, inspect, demo, bench, doctor, plan`.

In: arguments of a command line. Out: tables, JSON, pictures. Nothing in the library imports from here.
Read `cli` first; each command has a package, and `terminal` has what they share.
"""
