"""Make the virtual tensor: a tensor that user code reads as a CUDA tensor, with a shape, a storage and no values.

- tensor.py: makes and recognizes virtual tensors; the state that all of them read. methods.py: what `torch.Tensor`
  answers for them. live_storages.py: their storages.
- sparse_contents.py: what sparse ones consist of. fake_tensors.py: what torch's fake kernels get for them.
- saved.py: how they are pickled. local_device.py: names such as `cuda:3` in one rank.

values/ has what is known of their values.
"""
