"""Checkpoint knob: activations of repeated blocks, named layers or normalisations, recomputed in backward.

`blocks` finds the repeated blocks of a model, `pieces` makes them units of recomputation, `checkpointing` wraps
`torch.utils.checkpoint` around them, `segments` joins blocks into √N segments, which `regions` recompute, and `norms`
recomputes single modules. `recompute` runs a module a second time without its side effects, `selective` keeps the
results of matrix products, `watch` observes which pieces ran.
"""
