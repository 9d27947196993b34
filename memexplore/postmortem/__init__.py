"""Out of memory: what happened, who had the memory, and the way on.

- `message`: PyTorch's own error text as numbers.
- `liveness`, `reach`, `evidence`: of the live process, which tensors are reached from which variables, and which of
  these no code reads again.
- `counterfactual`, `cause`: a tape that ends out of memory, replayed under other conditions, and the cause.
- `held`, `suggestions`: memory that nothing needs any more, and the change that gives it back.
- `value`, `sentences`, `text`: the frozen `PostMortem` and its forms.
- `layout`: a tape of the present layout, where nothing was recorded.
- `release`: gives back what a failed cell still holds.
"""
