"""Programs that are run with knobs on a machine, to know what a setting does.

- `machine`: a `Machine`, made by `machine_of`. `run`: `run(program, knobs, machine)` returns a `Run`.
- `programs/`: what can be run, a `Step`, a `Cell` or a `Script`. `simulate`: a function as a program.
- `knobs/`: what can be changed, and how it is applied. `search/`: many settings. `code/`: settings as lines of code.
- `sentences`: the difference between two runs as one sentence. `dropped_prints`: a block without its prints.
"""
