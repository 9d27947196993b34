"""Make the virtual tensor: a tensor that user code reads as a CUDA tensor, with a shape, a storage and no values.

- tensor.py: `VirtualTensor` and the state that all of them read. live_storages.py: their storages on the device.
- user_classes.py: virtual tensors of a class of the user. local_device.py: names such as `cuda:3` in one rank.

values/ has what is known of their values.
"""
