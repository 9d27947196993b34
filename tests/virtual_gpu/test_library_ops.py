"""Ops of libraries, whose rules are found by name: torchvision's nms."""

from __future__ import annotations

import pytest
import torch

from memexplore.recorder.recording import record
from memexplore.run.machine import virtual
from memexplore.tape import Action
from memexplore.virtual_gpu.kernels import table


def test_a_rule_is_found_by_the_name_of_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    library = torch.library.Library("memexplore_test", "DEF")
    library.define("nms(Tensor boxes, Tensor scores, float threshold) -> Tensor")
    monkeypatch.setitem(table.TABLE, "memexplore_test.nms.default", table.TABLE["torchvision.nms.default"])
    with virtual("T4"):
        boxes, scores = torch.rand(1000, 4, device="cuda"), torch.rand(1000, device="cuda")
        with record() as recording:
            kept = torch.ops.memexplore_test.nms(boxes, scores, 0.5)
        assert boxes[kept].shape == (1000, 4)
    tape = recording.tape
    # Order, sorted boxes, 16 words of 64 bits for each box, flags; then the indices of the boxes.
    assert tape.size[tape.action == Action.ALLOC].tolist() == [8000, 16_000, 16 * 8 * 1000, 1000, 8000]
    assert any("nms keeps every box" in note for note in tape.meta.notes)


def test_detection_ops_of_torchvision_run() -> None:
    ops = pytest.importorskip("torchvision.ops")
    with virtual("T4"):
        boxes, scores = torch.rand(10, 4, device="cuda"), torch.rand(10, device="cuda")
        assert ops.nms(boxes, scores, 0.5).shape == (10,)
        images = torch.randn(1, 4, 16, 16, device="cuda", requires_grad=True)
        regions = torch.tensor([[0, 0.0, 0.0, 8.0, 8.0]], device="cuda")
        ops.roi_align(images, regions, (7, 7)).sum().backward()
        assert images.grad.shape == images.shape
