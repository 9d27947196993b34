"""Record every allocation and free of a run, with op, layer, phase, step and stack, as a Tape.

- `recording`: `record`, a block of code as a Tape.
- `recorder`: `Recorder`, to which ops, module hooks and optimizers report; `events` has the rows it writes. It holds
  `tags` (blocks of weights, gradients, optimizer state and inputs), `copies` of these, `communication` between ranks,
  `stacks` and `stream_timing`; `thread_state` has what belongs to one thread.
- `module_hooks`: global hooks of torch that report module calls and optimizer steps, and the names of layers.
- `tape_builder`: the recorded rows as a Tape; `categories` decides the category of each block.
- `real_device`: recording on the CPU, or on a GPU with the history of its allocator (`allocator_history`); `annotation`
  joins the two, by `matching` and the numbers of the ops in the stacks of the history (`op_numbers`).
- `earlier_blocks`: what earlier recordings say of blocks that are older than a recording of a real device.
- `driver_memory`: what the driver says of a GPU: its version, and memory outside the allocator.
- `isolation`: a run on a GPU that other code shares: segments of its own, unrelated tensors dropped.
- `history_api`: `torch.cuda.memory._record_memory_history` and related functions on the virtual GPU.
- `request_sequence`: the requests as a digest, to compare ranks that run in different processes.
"""
