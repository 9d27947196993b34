"""Out of memory: what happened, who had the memory, and the way on.

- `message`: PyTorch's own error text as numbers.
- `reach`, `evidence`: of the live process, which tensors are reached from which variables, and which of these the
  failing call does not use.
- `owners`: who has tensors that no variable reaches: library globals and reference cycles.
- `continuation`: what would follow the failed request, as the last complete period shows it.
- `counterfactual`, `cause`: a tape that ends out of memory, replayed under other conditions, and the cause.
- `held`, `held_types`: memory that nothing needs any more; `ended_calls` tells what the running calls use.
- `suggestions`, `needs`: the changes that give it back, or lower the need.
- `cures`: what a library offers against what its own objects keep, by their class.
- `untrained`, `optimizer_state`: facts for these.
- `value`, `sentences`, `text`, `html`: the frozen `PostMortem` and its forms; `processes` names other processes.
- `failed_program`, `names_before`: the cell or the script that failed, for another process.
- `what_fits`: the search for settings with which it fits; `changed_code`: a source with the lines of one of them.
- `layout`, `failure`: a tape of the present layout that ends with the failed request, where nothing was recorded.
- `release`: gives back what a failed cell still holds.
"""
