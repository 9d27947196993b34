"""Code generation: the lines of plain PyTorch that change a training script as knobs would.

- `lines`: all lines for a `Step` and `Knobs`, with those of the training loop.
- `diff`: the same lines as a diff against the script as written.
- `model`: the lines that change the model: freezing, adapters, precision, in-place activations.
- `checkpoints`: the lines for each checkpoint setting.
- `region`: the text of the classes and functions that some checkpoint settings need.

Tests run the lines on a new model, where they request and free the same sizes in the same order as the knobs.
"""
