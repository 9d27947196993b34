"""Fuzzers: inputs that nobody would write, each made from its number, and what must hold of every one of them.

- `snapshots`: damaged, changed and hostile snapshot files. `tapes`: the same for files of tapes.
- `growing`: the hostile structures whose cost may grow faster than the file.
- `programs`: random programs on the virtual GPU, against an independent count of the bytes that they hold.
- `files`: random programs that change files on a virtual GPU, against the same programs without one.
- `value_programs`: random programs on the virtual GPU, against the values of the CPU; `value_lines` has their lines.
- `interruptions`: reading a file, opening it and applying knobs, interrupted at any line.
- `runner`: child processes with a limit of CPU time and memory for each input.

`python -m tests.fuzz --kind snapshots --inputs 1000000` runs one kind for long; the tests beside run each for seconds.
"""
