"""Programs: what can be run with knobs, the devices, and the results.

- `step`, `cell`, `script`: what is run with `Knobs`, a training step, a notebook cell and a script (`interpreter` runs
  it as Python does, `ending` to the end of its process). `names`: what a cell begins with, the notebook's own
  variables or a packed copy.
- `packing`: a step, or the names of a cell, as bytes for another process.
- `limit` ends a run after so many optimizer steps or seconds.
- `loop`: how knobs act on a cell or a script while it runs. `seen` is what a run as written shows of its loop, `acting`
  applies knobs where the program comes to them: `made_optimizers` where it makes its optimizer, `micro_batches` around
  backward and step, `resized_inputs` where it makes its batch by hand. `hooks` intercepts what it calls of torch.
- `step_run`: a step executed once; an `execution.Execution` is its tape with the applied knobs and the cost.
- `expected`: the tape that another batch will probably have.
- `weights_on_cpu`: weights and buffers of an earlier virtual GPU, exchanged for the length of a run.
- `real_run`, `out_of_memory`: the run on a real device, and how a run ends out of memory.
- `trace_reuse`, `scratch_requests`, `step_record`: what a run on a virtual GPU reuses from earlier runs of the step.
- `outcome`: an `Outcome`, the numbers of a run: fits or out of memory, peaks, FLOPs, time.
- `training_loop`, `batches`, `optimizers`, `cost`: the loop that a step is run in, its batch, its optimizer, and the
  roofline model. `parallel`, `tensor_parallel`: the model on several GPUs.
- `written`: what a step says where a knob changes nothing, as texts.
- `fitting`: `fits`, whether a step or a function fits a GPU, with the margin.
"""
