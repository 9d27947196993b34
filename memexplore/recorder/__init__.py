"""Recorder: every allocation and free of a run, with op, layer, phase, step and stack, as a Tape.

- `recorder`: notes what ops, module hooks and optimizers report; `events` has the rows it writes,
  and `tags` finds the blocks of weights, gradients, optimizer state and inputs.
- `module_hooks`: global hooks of torch that report module calls and optimizer steps, and the names of layers.
- `stacks`: Python stacks interned as numbers.
- `request_sequence`: the requests as a digest, to compare ranks that run in different processes.
- `tape_builder`: the recorded rows as a Tape; `categories` decides the category of each block.
- `real_device`: recording on the CPU, or on a GPU with the history of its allocator (`allocator_history`); `annotation`
  joins the two, by `matching` and the numbers of the ops in the stacks of the history (`op_numbers`).
- `earlier_blocks`: what earlier recordings say of blocks that are older than a recording of a real device.
- `isolation`: a run on a GPU that other code shares: segments of its own, unrelated tensors dropped.
- `history_api`: `torch.cuda.memory._record_memory_history` and related functions on the virtual GPU.
"""
