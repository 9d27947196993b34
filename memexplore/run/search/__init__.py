"""Search: many settings of a step, each of them run.

- `sweep` runs given settings; `advise` searches for settings that fit a GPU and returns an `advice.Advice`.
- `candidates`: the knobs by themselves, and which batch to try next; `batch_extrapolation` estimates the largest batch.
- `combinations`: which knobs to run together; `estimates`: which settings to run first, and which cannot fit.
- `batch_search`: the largest batch of a setting; `larger_gpus`: the smallest GPU that fits; `several_gpus`: the fewest
  GPUs, and the cheapest set to rent. These are searches that `run_log` runs beside each other.
- `run_log`: all runs of one search; `progress`: how far it is.
- `searching`: a search only says what to run next; `runners` run it: here, in processes, on an executor.
- `workers`: processes of this machine; `results`: what comes back.
- `search_process` runs a search in a process of its own.
- `loop_search`: the search of the settings of a cell or a script.
- `results_table`: sweeps and advice as text and HTML tables.
"""
