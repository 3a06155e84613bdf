"""Settings, plans, runs and their results: everything between a user's call and the engine.

A call goes through these modules in order:

- `calls`, `stepper`: the functions and classes that users call
- `plan`: what is to be run, checked before anything is written
- `problem`, `spec`, `revive`: a run as live objects, as plain values, and the way between the two
- `execute`, `sweep`, `workers`: running a plan, batched, and on several processes
- `trace`, `run`, `store`, `reading`: what a run leaves behind, in memory and in files
- `results`: several runs, and which setting is best

`grids` has the values that sweeps try, and `costs` counts the bytes of a round.
"""
