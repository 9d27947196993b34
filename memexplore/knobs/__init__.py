"""Knobs: changes to a training step as a value, and their application to a model for a block.

- `knobs`: the value `Knobs`. `apply`: applies it to a model for a block, and yields an `ApplyReport`.
- `report`, `facts`: the report and its facts (changes with counts, skipped sites, notes); `report_text`: its text.
- `precision`, `adapters` (frozen layers and LoRA), `checkpoints/`, `inplace/`, and small ones in `apply`: the knobs.
- `undo`: a log of actions that restore a model. `forward`: wrappers of a model's forward. `scope`: autocast and
  checkpoints switched off during the forward of one model in one thread. `model_state`: a model's state preserved.

`mx.apply` works on real models on a CPU or a GPU, without a virtual GPU. `inplace` uses a virtual GPU only while one is
on, to find legal sites without values.

To add a knob:

1. `knobs.py`: an enum whose first member is AS_WRITTEN, a `Literal` type with its values as strings, a field of
   `Knobs` with its default, and a parameter of the `__init__` for type checkers.
2. `apply.py`: a function that takes an `apply.Application` and returns an `ApplyReport` with a `Change`. Before each
   change it records the action that restores the old state, as in
   ``application.log.add(setattr, module, "p", module.p)``. Enter the function in `MODEL_FIELDS`; the
   functions run in its order, and a later wrapper is outside an earlier one. A field of the training loop goes into
   `LOOP_FIELDS` and is handled in `steps/training_loop.py`.
3. Text: `report_text._WRITERS` for the report of a change, `facts.NoteKind` and `report_text._NOTES` for a note, and
   `_VALUE_TEXTS` or `_FIELD_NOUNS` in `steps/sentences.py` if the value alone is not a readable phrase.
4. A control in `notebook/knob_table.py` (`_model_knobs`), lines of code in `codegen/model.py`, and the list in
   docs/settings.md. For a cell that cannot have the knob, the reason in `steps/cell.py` (`_UNAVAILABLE`); for a watched
   loop that cannot switch it while it runs, in `live/locks.py`.
5. A knob that can save memory: `search.candidates.single_candidates`, and its effect, about, in
   `search.estimates.estimated`. A knob that changes what is trained: `search.candidates.ALTERING`, and a sentence in
   `search.trainings`. A knob that keeps the FLOPs of a step: `steps.sentences._FIELDS_THAT_KEEP_FLOPS`.
6. Tests: the lists in `tests/knobs/test_apply.py` and `tests/knobs/test_interrupts.py`, with a model that has what
   the knob changes, and `everything()` in `tests/small_nets.py` if it does not compare that; `OTHERS` in
   `tests/codegen/test_lines_tapes.py`.

`tests/knobs/test_every_knob.py` fails if a part of steps 1, 2 or 4 is missing, and names it.
"""
