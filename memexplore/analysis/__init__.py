"""Pure functions of a Tape: numbers, tables and sentences. Nothing here imports torch or plotly.

- `curves`: bytes after each row (requested, allocated, active, reserved), the peak, lifetimes of blocks
- `tables`: layers and tensors as DataFrames; the user's line of a stack
- `layer_rows`: the tree of layers with the bytes that each holds after a row, or its own maximum
- `groups`, `difference`: bytes by line of code; the difference of two tapes
- `growth`: what grows from step to step, and the leak among it
- `segments`, `addresses`: segments, blocks and free gaps after a row; fragmentation
- `location`, `places`: the position of a row in the run; lines of code as text
- `verdict`, `verdict_content`: whether the run fits, and what ended it; the same in words, for every surface
- `need`: the smallest capacity with which a run goes through, and what it reserves with room for everything
- `picture`: the tape to draw for a run that did not fit
- `summary`: the object of ``memexplore run --json``
- `placements`: the peaks over placements of segments by the driver
- `tradeoffs`: points of time against memory, and their frontier

A new number or table is a function here with a doctest; figures and the notebook call it.
"""
