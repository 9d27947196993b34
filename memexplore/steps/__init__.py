"""Runs of a step: the values that can be run with knobs, the devices, and the results.

- `step`, `cell`: the two values that are run with `Knobs`, a training step and a notebook cell.
- `trial`: one run of a step; a `Trial` is its tape with the applied knobs and the cost.
- `weights_on_cpu`: weights and buffers of an earlier virtual GPU, exchanged for the length of a run.
- `real_run`, `out_of_memory`: the run on a real device, and how a run ends out of memory.
- `trace_reuse`, `step_record`: results that a run on a virtual GPU reuses from earlier runs of the same step.
- `outcome`: an `Outcome`, the numbers of a trial: fits or out of memory, peaks, FLOPs, time.
- `training_loop`, `optimizers`, `cost`: the loop that a step is run in, its optimizer, the roofline model.
- `written`: what a step says where a knob changes nothing, as texts.
- `fitting`: `fits`, whether a step or a function fits a GPU, with the margin.
- `sentences`: the difference between two trials as one sentence.
"""
