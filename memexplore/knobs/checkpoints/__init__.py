"""Activation checkpointing: the repeated blocks of a model, and what of them is computed again."""
