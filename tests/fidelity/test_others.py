"""Answers of other tools and formulas against arithmetic, and the rows of the table."""

from __future__ import annotations

import gc
import sys

import pytest
import torch
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker

from memexplore.analysis import curves
from memexplore.run.machine import virtual
from tests.fidelity import (
    compared,
    formulas,
    others,
    paired_lm,
    recorded,
    recorded_models,
    recorded_training,
    small_lm,
    table,
)
from tests.gpu import golden


def linear(calls: int = 1) -> float:
    """Forward and backward of 100 -> 50 on 20 rows, the first call's gradients freed."""
    layer = nn.Linear(100, 50).to("cuda")
    x = torch.randn(20, 100, device="cuda")
    for _ in range(calls):
        layer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        layer(x).backward(torch.ones(20, 50, device="cuda"))
    return torch.cuda.max_memory_allocated()


# weight 100 * 50, bias 50 and x 20 * 100, all fp32
PARAMETERS, INPUT, OUTPUT = 4 * (100 * 50 + 50), 4 * 20 * 100, 4 * 20 * 50


def found(run) -> others.Subject:
    with others.on_fake_cpu():
        return others.subject(run)


@pytest.mark.parametrize("calls", [1, 3])
def test_mem_tracker_counts_a_linear_layer_without_rounding(calls):
    # at the end of backward: weights and gradients, x, the output and its gradient
    assert others.mem_tracker(lambda: linear(calls)) == 2 * PARAMETERS + INPUT + 2 * OUTPUT


def test_mem_tracker_counts_tensors_from_before_the_first_reset():
    def run() -> float:
        before = torch.ones(1000, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        after = torch.ones(500, device="cuda")
        del after
        return torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated() + before.nbytes

    # 500 floats above what remains, and the 1000 from before
    assert others.mem_tracker(run) == 4 * 1500

    def now() -> float:
        before = torch.ones(1000, device="cuda")
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated() + 0 * before.numel()

    assert others.mem_tracker(now) == 4 * 1000


def test_mem_tracker_without_peaks_of_modules_has_the_same_total(monkeypatch):
    def run() -> float:
        model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)).cuda()
        torch.cuda.reset_peak_memory_stats()
        model(torch.ones(20, 100, device="cuda")).sum().backward()
        return torch.cuda.max_memory_allocated()

    totals = others.mem_tracker(run)
    monkeypatch.setattr(others, "_TotalsOnly", MemTracker)
    assert others.mem_tracker(run) == totals


def test_mem_tracker_counts_optimizer_states():
    def run() -> float:
        layer = nn.Linear(100, 50).to("cuda")
        optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
        layer(torch.ones(20, 100, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    # weights, two states of AdamW, and its two counts of steps, an fp32 number each
    assert others.mem_tracker(run) == 3 * PARAMETERS + 2 * 4


def test_torchinfo_counts_parameters_inputs_and_outputs_twice():
    # and the Python list of the inputs
    assert others.torchinfo_total(found(linear)) == PARAMETERS + INPUT + 2 * OUTPUT + sys.getsizeof([INPUT])


def test_torchinfo_has_no_answer_without_a_module():
    seen = found(lambda: float(torch.ones(10, device="cuda").numel()))
    assert seen.module is None
    assert others.torchinfo_total(seen) is None


def test_the_subject_is_the_first_model_with_its_inputs_optimizer_and_autocast():
    def run() -> float:
        model = nn.Sequential(nn.Linear(10, 20), nn.ReLU()).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(2):
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(torch.ones(4, 10, device="cuda")).sum()
            loss.backward()
            optimizer.step()
        raise AssertionError("the first optimizer step is enough")

    seen = found(run)
    assert type(seen.module) is nn.Sequential
    assert [tuple(each.shape) for each in seen.inputs] == [(4, 10)]
    assert type(seen.optimizer) is torch.optim.SGD
    assert seen.autocast is torch.bfloat16


def test_the_subject_records_whether_gradients_were_enabled():
    def forward() -> float:
        nn.Linear(10, 20)(torch.ones(4, 10))
        return 0

    assert found(forward).gradients
    assert not found(torch.no_grad()(forward)).gradients


def test_several_models_of_one_script_have_no_subject():
    def run() -> float:
        x = nn.Linear(10, 10).cuda()(torch.ones(4, 10, device="cuda"))
        nn.ReLU()(x)  # has no parameters: not a second model
        nn.Linear(10, 10).cuda()(x)
        raise AssertionError("the second model is enough")

    with pytest.raises(ValueError, match="several models"):
        found(run)


def test_running_a_script_for_other_tools_leaves_torch_unchanged():
    functions = torch.autocast, nn.init.trunc_normal_, nn.Module._apply, torch.cuda.memory_allocated
    others.mem_tracker(linear)
    found(linear)
    assert (torch.autocast, nn.init.trunc_normal_, nn.Module._apply, torch.cuda.memory_allocated) == functions
    assert type(torch.ones(1)) is torch.Tensor
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_two_runs_in_one_process_are_independent():
    first = others.mem_tracker(linear)
    gc.collect()
    assert others.mem_tracker(linear) == first


# --- parameters plus a formula --------------------------------------------------------------------------------------


def test_activations_in_16_bits_are_those_of_the_paper():
    s, b, h, a, v = 64, 2, 32, 4, 100
    # sbh(34 + 5as/h) a layer, two layers; 4sbh(1 + v/h) at the end
    expected = 2 * s * b * (34 * h + 5 * a * s) + 4 * s * b * (h + v)
    shape = formulas.Shape(batch=b, context=s, width=h, heads=a, layers=2, vocabulary=v, element=2)
    assert formulas.transformer_activations(shape) == expected


def test_activations_in_32_bits_double_all_but_masks_and_logits():
    shape = formulas.Shape(batch=1, context=1, width=1, heads=1, layers=1, vocabulary=1)
    # 16 elements of 4 bytes and 2 masks; 2 elements and a mask; norm and head 2 elements; logits 4
    assert formulas.transformer_activations(shape) == (16 * 4 + 2) + (2 * 4 + 1) + 2 * 4 + 4


def test_a_step_adds_weights_gradients_and_two_states():
    fp32 = formulas.Shape(1, 1, 1, 1, 1, 1)
    mixed = fp32._replace(element=2)
    assert formulas.transformer_step(1000, fp32) - formulas.transformer_activations(fp32) == 16 * 1000
    assert formulas.transformer_step(1000, mixed) - formulas.transformer_activations(mixed) == 18 * 1000
    # logits of one token and one word beside the weights
    assert formulas.transformer_forward(1000, fp32) == 4 * 1000 + 4
    assert formulas.transformer_forward(1000, mixed) == 6 * 1000 + 2


def test_a_kept_graph_has_weights_and_activations_and_no_gradients():
    shape = formulas.Shape(batch=2, context=64, width=32, heads=4, layers=2, vocabulary=100)
    forward, graph, step = (formulas.language_model(1000, shape, run) for run in formulas.Run)
    assert graph == 4 * 1000 + formulas.transformer_activations(shape)
    # gradients and two states, 12 bytes a parameter
    assert step - graph == 12 * 1000
    # weights, and logits of 2 * 64 tokens
    assert forward == 4 * 1000 + 4 * 2 * 64 * 100


@pytest.mark.parametrize("model", [small_lm.SmallLm, paired_lm.PairedLm], ids=["modules", "bare parameters"])
def test_the_shape_of_a_language_model(model):
    with torch.device("meta"):
        built = model(vocabulary=100, width=32, layers=2, heads=4, inner=64)
        tokens = torch.zeros(3, 7, dtype=torch.int64)
    expected = formulas.Shape(batch=3, context=7, width=32, heads=4, layers=2, vocabulary=100, element=2)
    assert formulas.shape(built, tokens, 2) == expected


def test_a_network_has_parameters_inputs_and_what_its_layers_return():
    model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))
    parameters = 4 * (100 * 50 + 50 + 50 * 10 + 10)
    assert formulas.network(model, [torch.ones(20, 100)], 600) == parameters + 4 * 20 * 100 + 600


def test_attention_has_one_tensor_of_scores():
    one = 4 * 8 * 256 * 16
    assert formulas.attention(8, 256, 16, "memory_allocated after inputs") == 3 * one
    assert formulas.attention(8, 256, 16, "memory_allocated before backward") == 4 * one + 4 * 8 * 256 * 256
    assert formulas.attention(8, 256, 16, "max_memory_allocated fwd+bwd") == 7 * one + 4 * 8 * 256 * 256


def test_an_operation_has_everything_with_a_gradient_twice():
    with others.on_fake_cpu():
        seen = others.subject(linear)
        outputs, leaves = others.outputs_of(seen)
        assert formulas.operation(seen.module, seen.inputs, outputs) == 2 * PARAMETERS + INPUT + 2 * OUTPUT
        assert leaves == OUTPUT


def test_any_model_trained_by_adamw():
    def run() -> float:
        model = nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10)).cuda()
        model[0].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(20, 100, device="cuda")).sum().backward()
        optimizer.step()
        return 0

    with others.on_fake_cpu():
        size = table._any_model(others.subject(run))
    frozen, trained = 4 * (100 * 50 + 50), 4 * (50 * 10 + 10)
    # weights; of the trained layer a gradient and two states; what Linear, ReLU and Linear return
    assert size == frozen + 4 * trained + 4 * 20 * (50 + 50 + 10)


# --- the table ------------------------------------------------------------------------------------------------------


def row(measured: float, *answers: float | None) -> table.Row:
    text = "OOM" if measured == float("inf") else f"{measured:g} B"
    return table.Row("case", "2.13", "B", measured, text, 1000, answers)


def cells(line: str) -> list[str]:
    """A line of a Markdown table from its third cell on."""
    return [cell.strip() for cell in line.strip("|").split("|")][2:]


def test_the_summary_covers_the_rows_that_a_tool_answers():
    # errors 0, 10 and 30 % · 10 % · none · 50 %
    rows = [row(100, 100, 110, None, 50), row(100, 90, None, None, None), row(100, 130, None, None, None)]
    median, worst, answered, _ = table.summary(rows)
    assert cells(median) == ["", "10.00 %", "10.00 %", "—", "50.00 %"]
    assert cells(worst) == ["", "30.00 %", "10.00 %", "—", "50.00 %"]
    assert cells(answered) == ["3", "3", "1", "0", "1"]


def test_out_of_memory_is_predicted_by_an_answer_above_the_capacity():
    over = row(float("inf"), float("inf"), 1001, 1000, None)
    assert [table.runs_out(over, tool) for tool in range(4)] == [True, True, False, False]
    assert cells(table.summary([over])[3]) == ["1", "1", "1", "0", "0"]
    assert all(table.error(over, tool) is None for tool in range(4))


def test_a_golden_recording_becomes_a_row(tmp_path, monkeypatch):
    from tests.gpu.scenarios import SCENARIOS

    with virtual("H200", release="2.11"):
        peak = table._scenario("mlp_sgd")
    scenarios = {
        "mlp_sgd": {"outcome": "fits", "peak_allocated": peak + 512},
        "oom_forward": {"outcome": "oom"},
        "unet_adamw": {"outcome": "failed"},
    }
    run = {"gpu": {"name": "NVIDIA H200"}, "versions": {"torch": "2.11.0+cu130"}, "scenarios": scenarios}
    golden.write(tmp_path / golden.filename("NVIDIA H200", "2.11.0"), run)
    monkeypatch.setattr(golden, "FOLDER", tmp_path)
    first, second = table.golden_cases()
    assert (second.measured, second.settings) == ("OOM", SCENARIOS["oom_forward"].allocator)
    result = table.row(first)
    assert result.measured == peak + 512
    assert result.answers[0] == peak
    assert all(size is not None and size > 0 for size in result.answers), result.reasons


def test_every_compared_recording_has_a_row():
    every = [*recorded.RECORDED, *recorded_training.RECORDED, *recorded_models.RECORDED, recorded_models.LATE]
    assert list(table.RECORDINGS.values()) == every
    assert set(table.NOTES) <= set(table.RECORDINGS)
    assert set(compared.CAUSES) <= {case.name for case in every}


def test_a_recording_has_a_row_with_its_own_peak_and_its_requests():
    name = "recording attention-forward-backward"
    result = table.row(table._recording(name, table.RECORDINGS[name]))
    peak = curves.peak(recorded.measured(table.RECORDINGS[name]))[0]
    assert result.measured == peak
    assert result.answers[0] == peak
    assert result.answers[2] == formulas.attention(8, 4096, 16, "max_memory_allocated fwd+bwd")
    assert result.comparison is not None
    assert result.comparison.requests == len(recorded.requests(recorded.measured(table.RECORDINGS[name])))
    assert compared.markdown([result.comparison]) in table.markdown([result])


def test_the_formula_of_a_recorded_language_model_reads_its_script():
    name = "recording small-lm-train-seq100"
    case = table._recording(name, table.RECORDINGS[name])
    with others.on_fake_cpu():
        seen = others.subject(case.short)
        parameters = sum(parameter.numel() for parameter in seen.module.parameters())
        size = case.formula(seen)
    shape = formulas.Shape(batch=10, context=100, width=512, heads=16, layers=4, vocabulary=10_000)
    assert size == formulas.transformer_step(parameters, shape)


def test_only_memexplore_runs_the_earlier_models():
    case = table.RECORDINGS["recording lm-2.7b-train-seq128-h100"]
    assert table._without_others(case.run).keywords == {**case.run.keywords, "forwards": ()}
    alone = table.RECORDINGS["recording lm-2.7b-forward-seq128-h100"].run
    assert table._without_others(alone) is alone


def comparison(allocated: tuple[int, int], requested: tuple[int, int], absorbed_before: int = 0) -> compared.Comparison:
    return compared.Comparison("run", "2.6", 1, None, 0, 0, requested, allocated, (0, 0), absorbed_before, 0, 0, None)


def notes(predicted: float, found: compared.Comparison) -> list[str]:
    return list(table._notes("run", predicted - found.allocated[1], found))


def test_notes_explain_the_difference_from_a_recorded_peak():
    assert notes(100, comparison((100, 100), (90, 90))) == []
    (absorbed,) = notes(130, comparison((130, 100), (120, 90), absorbed_before=30))
    assert "understates its own peak by 30 B" in absorbed
    assert "differs by 0 B" in absorbed
    # 97 by itself, 100 with the recorded segment addresses
    (with_addresses,) = notes(97, comparison((100, 100), (90, 90)))
    assert "with the recorded segment addresses memexplore differs by 0 B" in with_addresses
    (blocks,) = notes(110, comparison((110, 100), (90, 90)))
    assert "larger than requested" in blocks
    assert notes(110, comparison((110, 100), (95, 90))) == []
