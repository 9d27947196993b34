"""Code generation: the lines of plain PyTorch that change a training script as knobs would.

- `lines`: all lines for a `Step` and `Knobs`, with the training loop.
- `diff`: the lines for an explorer: the person's own code with changes, else the lines of `lines`.
- `own_code`, `own_loop`, `own_lines`, `own_step`, `edits`: the training loop in a person's source, found through its
  syntax tree, and changed with their names; `Unclear` where that is not safe.
- `several_gpus`: the lines for several GPUs. `variables`: a cell with other values of its variables.
- `model`: the lines that change the model, which each knob has itself (`Knob.model_lines`).

Tests run the lines on a new model, where they request and free the same sizes in the same order as the knobs.
"""
