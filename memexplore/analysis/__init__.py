"""Pure functions of a Tape: numbers, tables and sentences. Nothing here imports torch or plotly.

- `curves`: bytes after each row (requested, allocated, active, reserved), the peak, lifetimes of blocks
- `tables`: layers and tensors as DataFrames; the user's line of a stack
- `groups`: bytes by line of code, growth from step to step, the difference of two tapes, the sentence for an OOM
- `segments`, `addresses`: segments, blocks and free gaps after a row; fragmentation
- `location`, `verdict`: the place of a row in the run; whether the run fits, and what ended it
- `summary`: the object of ``memexplore run --json`` and the two-line sentence
- `placements`: the peaks over placements of segments by the driver
- `tradeoffs`: points of time against memory, and their frontier

A new number or table is a function here with a doctest; figures and the notebook call it.
"""
