"""Knobs: changes to a training step as a value, and their application to a model for a block.

To add a knob, write a file here with one subclass of `Knob` whose `name` is the file's; `dropout.py` is an example.
Then run ``python -m docs.knobs``, which writes the table of docs/settings.md, and ``pytest
tests/knobs/test_every_knob.py``, which tests every file of this folder. Only lines of a training loop are elsewhere:
`code/lines.py`, `code/own_lines.py`.

A knob is one class in one file of this folder (`knob.Knob`), named as the file: its values, its place and its texts,
how it is applied to a model (`apply`), to a training loop (`change_loop`) or to a machine (`on_machine`) and undone,
what it contradicts, its controls in an explorer, where it is unavailable or locked and why, the lines of code that
change a model in the same way, whether it changes what is trained, and what it saves and costs.

- `knob`: what a knob is. `values`: kinds of values. `control`: the controls of an explorer.
- `knobs`: the registry `KNOBS`, which finds the files of this folder, and the value `Knobs` over it.
- `applying/`: `apply` applies a setting to a model and yields an `ApplyReport` (`report`); `undo` is the log of actions
  that restore a model, `forward` wraps a model's forward, `scope` switches features of torch off in one model and one
  thread, `model_state` preserves a model's state, `loop` has the parts of a training loop, `on_machine` the machine.
- `checkpoints/`, `inplace_sites/`: what these two knobs need.

`mx.apply` works on real models on a CPU or a GPU, without a virtual GPU. `inplace` uses a virtual GPU only while one is
on, to find legal sites without values.
"""
