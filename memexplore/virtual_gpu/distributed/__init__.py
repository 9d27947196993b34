"""Run one rank of a distributed run: process groups without other processes, and the memory of their collectives.

`init_process_group` of any backend makes this process one rank of a group of any size. Nothing is sent, and the
requests to the allocator are those of the same rank on a real machine with NCCL.

- `ranks.py`: this rank and the size of the group, and the environment variables that `torchrun` gives to a rank.
- `groups.py`: process groups that communicate with nobody, removed when the virtual GPU is turned off.
- `works.py`: works, which release what an asynchronous collective keeps. Its memory: kernels/collectives.py.
- `objects.py`: collectives of Python objects. `messages.py`: objects and files of ranks that run beside this one.
- `other_processes.py`: `torch.multiprocessing.spawn`, stores and torch.distributed.rpc.
- `data_parallel.py`: what the C++ part of DistributedDataParallel reads back from the GPU.
- `dtensor.py`: DTensor, hence FSDP2 and tensor parallelism; patched when the first group is made. Its composite ops:
  kernels/composite_dispatch.py.
- `fsdp1.py`, `zero_redundancy.py`: states of FSDP1 and ZeroRedundancyOptimizer, of which other ranks have parts.
  `fsdp2.py`: shards of FSDP2.
- `checkpoints.py`: torch.distributed.checkpoint. `pipelines.py`: torch.distributed.pipelining.
- `accelerate_state.py`: what accelerate records about the process for its life. `deepspeed_kernels.py`: stand-ins for
  the kernels that DeepSpeed compiles.
- `patches.py`: all of these as patches.

**Assumption**: every rank does what this rank does (`ASSUMED` in groups.py).
"""
