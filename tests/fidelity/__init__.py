"""Runs of real GPUs, published or recorded, against the virtual GPU; `python -m tests.fidelity` prints them."""
