"""Knobs: changes to a training step as a value, and their application to a model for a block.

`knobs` has the value `Knobs`, and `apply` puts it onto a model and yields an `ApplyReport` (`report`, made of `facts`,
written as English by `report_text`). The knobs themselves are in `precision`, `adapters` (frozen layers and LoRA),
`checkpoints/`, `inplace/` and, where a few lines suffice, in `apply`. What they share: `undo` (a log that restores
everything), `forward` (the forward of a model wrapped), `scope` (what is off inside one model's forward, in one
thread), `model_state` (preservation of a model's state during a run).

No simulation is needed: `mx.apply` works on real models on a CPU or a GPU. The virtual GPU is imported to recognise
its tensors, and it is used only by the fake run of `inplace` while one is on.

To add a knob:

1. `knobs.py`: an enum whose first member is AS_WRITTEN, a `Literal` type with its texts, a field of `Knobs` with its
   default, and a parameter of the `__init__` for type checkers.
2. Write a function that takes an `apply.Target`, records in its undo log each change before making it, and returns an
   `ApplyReport` with a `Change`; enter it in `apply.MODEL_FIELDS`. If the field concerns the training loop, enter its
   name in `apply.LOOP_FIELDS` and follow it in `steps/training_loop.py`.
3. If the value alone is no good phrase, add one to `report_text` (changes) and `steps/sentences.py` (settings).
4. Add a control in `notebook/controls.py`, the lines of code in `codegen/`, and, if it can save memory, an entry in
   `search.candidates.single_candidates`. If a notebook cell cannot have it, name the reason in `steps/cell.py`.

`tests/knobs/test_every_knob.py` fails with the name of the place that was forgotten. Add the knob to the lists of
`tests/knobs/test_apply.py` and `tests/knobs/test_interrupts.py`, too.
"""
