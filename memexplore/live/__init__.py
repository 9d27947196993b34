"""Watching a training run while it goes on: every step lightly, some steps completely.

- `watch`: the context manager, and the entries in torch's tables of hooks. `noted_calls`: the methods of torch that it
  replaces. `live`: its value.
- `program`: a whole program, for the command line.
- `watcher`: what the hooks do; it decides where a step ends. `counters`: the memory counters of each device.
- `schedule`: which steps are recorded completely. `recording`: one such step, as a Tape.
- `store`: everything kept, in bounded memory: `thinning` (rows of steps), `layer_history`, `recorded_steps` (tapes).
- `control`: knobs switched at the borders of steps, with `setting` (on the models), `locks` (what cannot be switched)
  and `changes` (their table). `loop`: what `live` hands the loop for precision and accumulation.
- `forecasts`: what the virtual GPU predicts for a setting, by `prediction` in a process of its own, which gets the step
  or the cell. `model_pickler`: models as they were before they were watched.
- `reasons` and `shapes`: why a peak rose. `leaks` and `holders`: memory that keeps rising, and who holds it. `notes`:
  what is not measured, as sentences.
- `optimizers`: which optimizers end steps.
- `layer_meter`, `hook_cost`: layers in light steps.
- `storages_at_start`, `unseen_requests`, `compiled`: what a recorded step cannot see by itself.
- `parts`: micro-batches. `rank_folder`: the folder of this rank.
"""
