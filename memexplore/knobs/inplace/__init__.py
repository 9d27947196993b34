"""Activations that overwrite their input: where that is legal, and the switch."""

from memexplore.knobs.inplace.legal import in_place, legal_sites, watched

__all__ = ["in_place", "legal_sites", "watched"]
