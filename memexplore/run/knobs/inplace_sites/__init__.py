"""In-place knob: activations that overwrite their input, where that is legal.

`legal` finds the legal sites of a step (a `sites.Sites`): `trace` and `check` observe its memory accesses
(`memory_access`, `byte_ranges`). `in_place` applies the knob to a model through a `switch`, after a `fake_run` at the
first call if no sites are given. `activations` has the activation functions themselves.
"""
