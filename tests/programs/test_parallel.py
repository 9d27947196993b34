"""A step on several GPUs: peaks and bytes sent by hand, and the model as it was afterwards."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memexplore as mx
from memexplore.recorder.recorder import Recorder
from memexplore.run.knobs.applying.on_machine import on_machine
from memexplore.run.knobs.knobs import Knobs
from memexplore.run.knobs.tensor_parallel import why_not_shared
from memexplore.run.machine import machine_of
from memexplore.run.programs.parallel import replicated
from memexplore.run.programs.step import Step
from memexplore.run.programs.step_run import traced
from memexplore.run.run import Want, run
from memexplore.run.search.sweep import sweep
from memexplore.run.sentences import link_sentence

MIB = 1024**2
LAYER = 4 * MIB  # 1024 x 1024 numbers of 4 bytes
LAYERS = 4
WEIGHTS = LAYERS * LAYER
WORKSPACES = 2 * 32 * MIB  # of cuBLAS on an H100 in forward and backward
RELEASE = "2.13"


def model() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(LAYERS)))


def step_of(network: nn.Module | None = None, optimizer: Any = torch.optim.AdamW) -> Step:
    return Step(network or model(), torch.ones(8, 1024), loss=torch.mean, optimizer=optimizer)


def run_of(setting: dict[str, Any], step: Step | None = None) -> Any:
    return run(step or step_of(), Knobs(**setting), machine_of("H100", release=RELEASE))


@pytest.mark.parametrize(
    ("setting", "sent"),
    [
        # All-reduce of the gradients: each of 4 parts goes around twice.
        ({"strategy": "ddp"}, 2 * WEIGHTS * 3 // 4),
        # All-gather in forward and in backward, reduce-scatter of the gradients.
        ({"strategy": "fsdp2"}, 3 * WEIGHTS * 3 // 4),
        ({"strategy": "fsdp2 no reshard"}, 2 * WEIGHTS * 3 // 4),
        # Two bytes for a gathered number, four for a gradient.
        ({"strategy": "fsdp2", "fsdp_precision": "bf16, reduced in fp32"}, (WEIGHTS // 2 * 2 + WEIGHTS) * 3 // 4),
        ({"strategy": "fsdp2", "fsdp_precision": "bf16"}, 3 * WEIGHTS // 2 * 3 // 4),
        # Shards of half: the three above in pairs, and the all-reduce of a shard between the pairs.
        ({"strategy": "hsdp"}, 3 * WEIGHTS // 2 + 2 * WEIGHTS // 2 // 2),
        # As DDP; then each updated parameter goes to all others.
        ({"strategy": "zero 1"}, 2 * WEIGHTS * 3 // 4 + WEIGHTS),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bytes_sent_are_those_of_the_ring(setting: dict[str, Any], sent: int) -> None:
    assert run_of({"gpus": 4, **setting}).cost.sent == sent


def test_two_micro_batches_of_ddp_are_reduced_once_and_those_of_fsdp2_twice() -> None:
    once = run_of({"gpus": 4, "accumulation": 2}).cost.sent
    assert once == 2 * WEIGHTS * 3 // 4
    assert run_of({"gpus": 4, "accumulation": 2, "strategy": "fsdp2"}).cost.sent == 2 * 3 * WEIGHTS * 3 // 4


@pytest.mark.parametrize("gpus", [2, 8])
def test_weights_gradients_and_state_are_shards(gpus: int) -> None:
    outcome = run(step_of(), Knobs(gpus=gpus, strategy="fsdp2"), machine_of("H100", release=RELEASE)).outcome
    # Parameters, gradients and two states of AdamW; the whole gradient of the last layer is freed after backward.
    least = 4 * WEIGHTS // gpus
    assert least <= outcome.constant - WORKSPACES < least + LAYER + MIB


def test_ddp_holds_buckets_as_large_as_the_gradients() -> None:
    outcome = run(step_of(), Knobs(gpus=2), machine_of("H100", release=RELEASE)).outcome
    # parameters, gradients, buckets, two states
    assert 5 * WEIGHTS <= outcome.constant - WORKSPACES < 5 * WEIGHTS + MIB


def test_zero_1_runs_the_rank_that_has_most_state() -> None:
    # The largest layer goes to rank 0, the two others to rank 1, which then has more.
    network = nn.Sequential(nn.Linear(1024, 1536, bias=False), nn.Linear(1536, 1024, bias=False), nn.Linear(1024, 1024))
    result = run_of({"gpus": 2, "strategy": "zero 1"}, step_of(network))
    # 1536 x 1024 on each of both, then 1024 x 1024 on rank 0 and its bias on rank 1
    assert any("rank 0 of 2" in note for note in result.tape.meta.notes)
    network = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 900, bias=False), nn.Linear(900, 900, bias=False))
    result = run_of({"gpus": 2, "strategy": "zero 1"}, step_of(network))
    # 1024 * 1024 + 1024 on rank 0; 900 * 1024 + 900 * 900 on rank 1
    assert any("rank 1 of 2" in note for note in result.tape.meta.notes)


def content(network: nn.Module) -> list[Any]:
    return [
        (
            type(module),
            {name: dict(value) if isinstance(value, dict) else value for name, value in vars(module).items()},
        )
        for module in network.modules()
    ]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "zero 1"])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt], ids=["complete", "interrupted"])
def test_the_model_is_as_it_was(strategy: Any, error: type[BaseException] | None) -> None:
    network = nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    )
    before, values = content(network), [value.clone() for value in network.state_dict().values()]

    def loss(output: torch.Tensor) -> torch.Tensor:
        if error is not None:
            raise error
        return output.mean()

    step = Step(network, torch.ones(8, 8), loss=loss)
    for _ in range(2):
        if error is None:
            run_of({"gpus": 2, "strategy": strategy}, step)
        else:
            with pytest.raises(error):
                run_of({"gpus": 2, "strategy": strategy}, step)
    after = content(network)
    assert [kind for kind, _ in after] == [kind for kind, _ in before]
    for (_, one), (_, other) in zip(before, after, strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            if name in ("_parameters", "_buffers"):
                assert all(value[key] is other[name][key] for key in value)
            else:
                assert value == other[name]
    assert all(map(torch.equal, values, network.state_dict().values()))
    assert not torch.distributed.is_initialized()
    assert network(torch.ones(2, 8)).shape == (2, 8)


def test_knobs_of_the_model_are_applied_before_it_is_wrapped() -> None:
    setting = {"gpus": 2, "strategy": "fsdp2", "precision": "all bf16", "lora": "0", "checkpoint": "every 2"}
    result = run_of(setting)
    assert result.applied.texts[-2:] == ("2 GPUs", "FSDP2 of 4 blocks")
    # Only the adapters of the first layer have gradients, 2 x 8 x 1024 numbers of 2 bytes, and all are gathered in
    # forward, and again in backward down to the adapters. Frozen blocks are not gathered in backward for themselves.
    assert result.cost.sent < 2 * WEIGHTS // 2


def test_an_optimizer_object_gives_its_settings_to_the_shards() -> None:
    network = model()
    momentum = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    outcome = run(
        step_of(network, momentum), Knobs(gpus=4, strategy="fsdp2"), machine_of("H100", release=RELEASE)
    ).outcome
    # Parameters, gradients, one momentum
    assert 3 * WEIGHTS // 4 <= outcome.constant - WORKSPACES < 3 * WEIGHTS // 4 + LAYER + MIB
    assert momentum.param_groups[0]["params"] == list(network.parameters())


def test_an_optimizer_of_other_parameters_is_refused() -> None:
    weights = list(model().parameters())
    step = step_of(optimizer=lambda parameters: torch.optim.SGD(weights))
    with pytest.raises(ValueError, match="does not use the parameters that it gets"):
        run_of({"gpus": 2}, step)


def test_the_cpu_has_no_several_gpus() -> None:
    with pytest.raises(ValueError, match="name a GPU as well"):
        run(step_of(), Knobs(gpus=2), machine_of("cpu"))


def test_a_model_without_a_plan_has_no_tensor_parallelism() -> None:
    with pytest.raises(ValueError, match="no tensor-parallel plan"):
        run_of({"gpus": 2, "tensor_parallel": 2})


class Planned(nn.Module):
    """Two layers and their plan, as a model of transformers has it."""

    tp_plan = {"up": "colwise", "down": "rowwise"}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(1024, 4096, bias=False), nn.Linear(4096, 1024, bias=False)
        self.norm = nn.LayerNorm(1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.down(self.up(x)))


def test_layers_of_a_plan_are_shared() -> None:
    assert why_not_shared(Planned()) == ""
    result = run(step_of(Planned()), Knobs(gpus=4, tensor_parallel=4), machine_of("H100", release=RELEASE))
    shared = 2 * 4096 * 1024 * 4 // 4
    assert 4 * shared <= result.outcome.constant - WORKSPACES < 4 * shared + MIB
    # The output of the second layer is added up: 8 x 1024 numbers of 4 bytes, the gradient of the input is not needed.
    assert result.cost.sent == 2 * 8 * 1024 * 4 * 3 // 4
    assert (result.outcome.gpus, result.outcome.batches) == (4, 1)


def test_a_plan_with_a_style_that_torch_lacks_is_refused() -> None:
    network = Planned()
    network.tp_plan = {"up": "packed_colwise"}
    assert "packed_colwise" in why_not_shared(network)


def test_the_time_is_the_longer_of_computing_and_sending() -> None:
    outcome = run(step_of(), Knobs(gpus=2), machine_of("T4", release=RELEASE)).outcome
    # All-reduce of 16 MiB between two: 16 MiB at 15.75 GB/s of PCIe 3.0
    assert outcome.link_seconds == pytest.approx(WEIGHTS / 15.75e9)
    assert outcome.seconds == max(outcome.link_seconds, outcome.compute_seconds)
    assert link_sentence(outcome).startswith("Each of 2 GPUs sends 16.0 MiB a step: 1.07 ms by PCIe 3.0 at full rate")


def test_groups_of_several_nodes_send_through_the_network() -> None:
    inside = run(step_of(), Knobs(gpus=8), machine_of("H100", release=RELEASE)).outcome
    across = run(step_of(), Knobs(gpus=16), machine_of("H100", release=RELEASE)).outcome
    assert inside.link_seconds == pytest.approx(2 * WEIGHTS * 7 / 8 / 450e9)  # NVLink
    assert across.link_seconds == pytest.approx(2 * WEIGHTS * 15 / 16 / 50e9)  # 400 Gbit/s


def test_a_sweep_shows_what_is_sent() -> None:
    found = sweep(step_of(), [Knobs(), Knobs(gpus=2)], gpu="H100", progress=None)
    assert found.to_pandas()["sent"].tolist() == [0, WEIGHTS]
    assert "16.0 MiB" in str(found)
    assert "sent by each GPU" not in str(sweep(step_of(), [Knobs()], gpu="H100", progress=None))


def test_a_wrapper_has_the_attributes_and_the_layer_names_of_its_model() -> None:
    with mx.virtual("H100"):
        torch.distributed.init_process_group("nccl", rank=0, world_size=2)
        network = model().cuda()
        network.vocabulary = 7  # type: ignore[assignment]
        wrapped = replicated(network)
        assert wrapped.vocabulary == 7
        assert [name for name, _ in wrapped.named_modules()] == ["", "0", "1", "2", "3"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "fsdp2 no reshard", "hsdp", "zero 1"])
def test_a_setting_that_was_traced_is_not_run_again(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step, knobs = step_of(), Knobs(gpus=4, strategy=strategy)
    run(step, knobs, machine_of("2GiB"))
    elsewhere = traced(step_of(), knobs, on_machine(knobs, machine_of("1GiB")))
    monkeypatch.setattr(Recorder, "alloc", lambda *_: pytest.fail("an op was traced"))
    derived = run(step, knobs, machine_of("1GiB"))
    assert derived.tape.equals(elsewhere.tape)
    assert (derived.tape.meta.world, derived.cost) == (4, elsewhere.cost)


def test_a_setting_that_does_not_fit_is_run_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    shard = torch.distributed.fsdp.fully_shard
    monkeypatch.setattr(
        torch.distributed.fsdp, "fully_shard", lambda *of, **named: calls.append(1) or shard(*of, **named)
    )
    outcome = run(step_of(), Knobs(gpus=2, strategy="fsdp2"), machine_of("24MiB"), want=Want.NUMBERS).outcome
    assert not outcome.fits
    assert len(calls) == LAYERS + 1  # each layer, and the model


def test_tensor_parallel_groups_without_a_strategy_end_in_one_sentence() -> None:
    with pytest.raises(ValueError, match=r"^tensor_parallel=2 on 4 GPUs needs .*: write strategy='fsdp2'$"):
        run(step_of(), Knobs(gpus=4, tensor_parallel=2))
