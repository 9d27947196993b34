"""The controls of several GPUs: which of them can be set, and what a position means."""

from __future__ import annotations

import torch

from memexplore.jupyter import tabs
from memexplore.jupyter.explore import explore
from memexplore.run.knobs.control import Explored
from memexplore.run.knobs.knob import Group
from memexplore.run.knobs.knobs import Knobs, controls_of, not_now
from memexplore.run.knobs.strategy import Strategy
from memexplore.run.machine import machine_of
from memexplore.run.programs.step import Step

CONTROLS = {
    control.name: control
    for control in controls_of(Explored(machine_of("T4")))
    if control.knob.group is Group.SEVERAL_GPUS
}


def waiting(knobs: Knobs) -> set[str]:
    return set(not_now(knobs)) & set(CONTROLS)


def test_controls_wait_for_a_second_gpu_and_for_fsdp2() -> None:
    assert waiting(Knobs()) == set(CONTROLS) - {"gpus"}
    assert waiting(Knobs(gpus=2)) == {"fsdp_precision", "fsdp_offload"}
    assert waiting(Knobs(gpus=2, strategy="fsdp2")) == set()


def test_one_gpu_takes_all_others_back() -> None:
    knobs = Knobs(gpus=8, strategy="fsdp2", fsdp_precision="bf16", tensor_parallel=2, batch=4)
    assert CONTROLS["gpus"].updated(knobs, 1) == Knobs(batch=4)
    assert CONTROLS["gpus"].updated(knobs, 4).tensor_parallel == 2


def test_only_divisors_of_the_gpus_share_a_layer() -> None:
    labels = [option.label for option in CONTROLS["tensor_parallel"].positions(Knobs(gpus=4))]
    assert labels == ["1", "2", "4"]


def test_an_explorer_runs_several_gpus_and_hides_what_does_not_apply() -> None:
    step = Step(torch.nn.Linear(512, 512), torch.zeros(8, 512), loss=torch.mean)
    explorer = explore(step, gpu="T4")
    explorer.knobs = Knobs(gpus=2, strategy=Strategy.FSDP2)
    assert explorer.run.applied.texts == ("2 GPUs", "FSDP2")
    assert "tensor-parallel plan" in str(explorer.message()["hidden"])
    assert "fully_shard(model" in explorer.view._tabs[tabs.CODE]["text"]
