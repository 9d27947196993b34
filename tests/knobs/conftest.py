"""State of torch that every test of the knobs must leave as it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def torch_state() -> Iterator[None]:
    """Compare the settings of torch before and after a test: the next file in the same process trains under them."""
    before = _settings()
    yield
    assert _settings() == before


def _settings() -> dict[str, object]:
    return {
        "autocast": [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda")],
        "autocast cache": torch.is_autocast_cache_enabled(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "checkpoint": torch.utils.checkpoint.checkpoint,
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
