"""One rank of a distributed run: process groups without other processes, and the memory of their collectives.

`init_process_group` of any backend makes this process one rank of a group of any size. Nothing is sent, and the
requests to the allocator are those of the same rank on a real machine with NCCL.

- `ranks.py`: this rank and the size of the group, from arguments, the URL or the environment.
- `launch.py`: the environment variables that `torchrun` gives to a rank.
- `groups.py`: process groups that communicate with nobody, removed when the virtual GPU is turned off.
- `works.py`: works, which release what an asynchronous collective keeps. Its memory: kernels/collectives.py.
- `objects.py`: collectives of Python objects. `spawned.py`: one process of `torch.multiprocessing.spawn`. `stores.py`:
  stores that wait for no other process.
- `data_parallel.py`: what the C++ part of DistributedDataParallel reads back from the GPU.
- `dtensor.py`: DTensor, hence FSDP2 and tensor parallelism; patched when the first group is made. Its composite ops:
  kernels/composite_dispatch.py. `list_ops.py`: shardings of lists of DTensors.
- `flat_states.py`, `sharded_states.py`, `sharded_tensors.py`: states of FSDP1 and ZeroRedundancyOptimizer, of which
  other ranks have parts. `shards.py`: those of FSDP2 that are read.
- `late_imports.py`: the patches of modules that are imported later. `remote_calls.py`: torch.distributed.rpc.
- `accelerate_state.py`: what accelerate records about the process for its life. `deepspeed_kernels.py`: stand-ins for
  the kernels that DeepSpeed compiles.
- `patches.py`: all of these as patches.

**Assumption**: every rank does what this rank does (`ASSUMED` in groups.py).
"""
