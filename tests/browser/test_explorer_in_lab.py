"""The explorer in a real JupyterLab: every control by keyboard and by mouse, and the drawn figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from memexplore.knobs.knobs import Knobs
from tests.browser.explored import DRAWN, GRAPH, HEAD, knob, ran, reset, wait_for

pytestmark = pytest.mark.browser


class Turn(NamedTuple):
    """One control: a key and its result, a choice by mouse and its result."""

    label: str
    key: str
    by_key: Knobs
    choice: str
    by_mouse: Knobs


EXPANDABLE = Knobs(settings="expandable_segments:True")
CHOICES = [
    Turn("Precision", "ArrowDown", Knobs(precision="off"), "bf16 autocast", Knobs(precision="bf16")),
    Turn("In place", "ArrowDown", Knobs(inplace="off"), "on", Knobs(inplace="on")),
    Turn("Checkpoint", "ArrowDown", Knobs(checkpoint="none"), "√N segments", Knobs(checkpoint="sqrt")),
    Turn("Optimizer", "ArrowDown", Knobs(optimizer="SGD"), "Adafactor", Knobs(optimizer="Adafactor")),
    Turn("Update", "ArrowDown", Knobs(update="foreach"), "in backward", Knobs(update="in backward")),
    Turn(
        "zero_grad", "ArrowDown", Knobs(zero_grad="set to none"), "gradients to zeros", Knobs(zero_grad="set to zero")
    ),
    Turn("GPU", "ArrowUp", Knobs(gpu="RTX 3060"), "A100 40GB", Knobs(gpu="A100 40GB")),
    Turn(
        "Max split",
        "ArrowDown",
        Knobs(settings="max_split_size_mb:20"),
        "64 MiB",
        Knobs(settings="max_split_size_mb:64"),
    ),
    Turn(
        "Round up 2ⁿ",
        "ArrowDown",
        Knobs(settings="roundup_power2_divisions:2"),
        "8 steps",
        Knobs(settings="roundup_power2_divisions:8"),
    ),
    Turn(
        "GC from",
        "ArrowDown",
        Knobs(settings="garbage_collection_threshold:0.5"),
        "80 %",
        Knobs(settings="garbage_collection_threshold:0.8"),
    ),
]
SLIDERS = {
    # The next smaller power of two, the next divisor, and a quarter less; then what lies at the right end.
    "Batch": ("ArrowLeft", Knobs(batch=32), Knobs(batch=1024)),
    "Micro-batches": ("ArrowRight", Knobs(accumulation=2), Knobs(accumulation=64)),
    "Input size": ("ArrowLeft", Knobs(input_size=24), Knobs(input_size=64)),
}
SWITCHES = {
    "channels_last": Knobs(memory_format="channels last"),
    "saved tensors on the CPU": Knobs(offload="saved tensors on the CPU"),
    "inference only (eval, no_grad)": Knobs(mode="inference"),
    "expandable segments": EXPANDABLE,
}
LINES = {
    "Checkpoint": ("1 2", Knobs(checkpoint="layers 1 2")),
    "Freeze": ("1 2", Knobs(frozen=("1", "2"))),
    "LoRA": ("7", Knobs(lora="7")),
}


def test_every_knob_by_keyboard(explored: Any) -> None:
    for turn in CHOICES:
        knob(explored, turn.label, "select").press(turn.key)
        wait_for(explored, turn.by_key)
        reset(explored)
    for label, (key, knobs, _) in SLIDERS.items():
        knob(explored, label, ".noUi-handle").press(key)
        wait_for(explored, knobs)
        reset(explored)
    for label, knobs in SWITCHES.items():
        explored.page.get_by_label(label, exact=True).press("Space")
        wait_for(explored, knobs)
        reset(explored)
    for label, (names, knobs) in LINES.items():
        line = knob(explored, label, "input[type=text]")
        line.press_sequentially(names)
        line.press("Enter")
        wait_for(explored, knobs)
        if label == "LoRA":
            knob(explored, "LoRA rank", ".noUi-handle").press("ArrowRight")
            wait_for(explored, Knobs(lora="7", lora_rank=16), knobs)
        reset(explored)


def test_every_knob_by_mouse(explored: Any) -> None:
    for turn in CHOICES:
        knob(explored, turn.label, "select").select_option(turn.choice)
        wait_for(explored, turn.by_mouse)
        reset(explored)
    for label, (_, _, knobs) in SLIDERS.items():
        # The right end of the line.
        track = knob(explored, label, ".noUi-base").bounding_box()
        explored.page.mouse.click(track["x"] + track["width"] - 1, track["y"] + track["height"] / 2)
        wait_for(explored, knobs)
        reset(explored)
    for label, knobs in SWITCHES.items():
        explored.page.get_by_label(label, exact=True).click()
        wait_for(explored, knobs)
        reset(explored)


def test_button_checkpoints_the_clicked_layer(explored: Any) -> None:
    explored.page.get_by_role("treeitem", name=re.compile("^7, ")).click()
    explored.page.wait_for_selector(".memexplore-chip:not([hidden])")
    layer = explored.page.locator(".memexplore-chip").inner_text().split()[0]
    take = explored.page.locator(".memexplore-group button").filter(has_text="Checkpoint")
    assert take.is_enabled()
    take.click()
    wait_for(explored, Knobs(checkpoint=f"layers {layer}"))
    explored.run(3)
    assert explored.text(3) == f"checkpoint layers {layer}\n"


def test_failing_setting_shows_the_reason_and_keeps_the_figure(explored: Any) -> None:
    height = explored.page.evaluate(f"() => {GRAPH}.getBoundingClientRect().top")
    line = knob(explored, "Freeze", "input[type=text]")
    line.fill("nowhere")
    line.press("Enter")
    explored.page.wait_for_selector(".memexplore-headline .memexplore-problem")
    assert "nowhere" in explored.page.locator(".memexplore-problem").first.inner_text()
    drawn = explored.page.evaluate(DRAWN)
    assert drawn["peak"] == ran(Knobs())[1].peak_allocated
    # nothing below the sentence has moved
    assert explored.page.evaluate(f"() => {GRAPH}.getBoundingClientRect().top") == height
    line.fill("")
    line.press("Enter")
    explored.page.wait_for_selector(".memexplore-headline .memexplore-problem", state="detached")


def test_last_value_of_a_fast_slider_stays(explored: Any) -> None:
    handle = knob(explored, "Batch", ".noUi-handle")
    for _ in range(6):
        handle.press("ArrowLeft")
    # 64, 32, 16, 8, 4, 2, 1
    explored.page.wait_for_function(f"peak => ({DRAWN})().peak === peak", arg=ran(Knobs(batch=1))[1].peak_allocated)
    explored.settle()
    assert explored.page.evaluate(DRAWN)["sentence"].startswith("Batch of 1: ")


def test_history_code_and_trade_offs(explored: Any) -> None:
    page = explored.page
    knob(explored, "Precision", "select").select_option("bf16 autocast")
    wait_for(explored, Knobs(precision="bf16"))
    page.get_by_role("tab", name="Code", exact=True).click()
    page.wait_for_function("() => document.querySelector('.memexplore-code')?.textContent.includes('torch.bfloat16')")
    page.get_by_role("tab", name="Trade-offs", exact=True).click()
    page.wait_for_function(
        "() => document.querySelector('.memexplore-figure')?.querySelectorAll('.scatterlayer .point').length === 2"
    )
    page.get_by_role("tab", name="History", exact=True).click()
    page.locator(".memexplore-settings button", has_text="as written").press("Enter")
    wait_for(explored, Knobs(), Knobs(precision="bf16"))
    rows = page.locator(".memexplore-settings tbody tr")
    page.wait_for_function(
        "() => document.querySelector('.memexplore-settings [aria-current] button').textContent === 'as written'"
    )
    assert rows.count() == 2


def test_skipped_sites_are_on_the_screen(explored: Any) -> None:
    knob(explored, "Checkpoint", "select").select_option("norms, activations")
    knobs = Knobs(checkpoint="norms")
    wait_for(explored, knobs)
    skipped = ran(knobs)[0].applied.skipped
    assert skipped
    for entry in skipped:
        explored.page.get_by_text(f"{entry.site}: {entry.reason}").wait_for()


def test_lines_can_be_copied(explored: Any) -> None:
    page = explored.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    knob(explored, "Optimizer", "select").select_option("SGD")
    wait_for(explored, Knobs(optimizer="SGD"))
    explored.settle()
    page.get_by_role("tab", name="Code", exact=True).click()
    code = page.wait_for_selector(".memexplore-code").inner_text()
    page.get_by_role("button", name="Copy", exact=True).click()
    page.get_by_role("button", name="Copied", exact=True).wait_for()
    assert page.evaluate("() => navigator.clipboard.readText()").strip() == code.strip()


def test_what_would_fit(explored: Any) -> None:
    page = explored.page
    page.get_by_role("button", name="What would fit?").click()
    page.get_by_role("tab", name="Advice", exact=True).wait_for(timeout=240_000)
    page.get_by_text("It fits as written").filter(visible=True).wait_for()
    # The first row is the step as it is.
    assert page.locator(".memexplore-settings button").filter(visible=True).first.inner_text() == "as written"


def test_zoom_stays_on_the_same_rows(explored: Any) -> None:
    page = explored.page
    page.evaluate(f"() => {{ const graph = {GRAPH}; graph.scrollIntoView({{block: 'center'}}) }}")
    explored.settle()
    left, middle, width = page.evaluate(
        f"""() => {{ const graph = {GRAPH}, box = graph.getBoundingClientRect(), {{ xaxis, yaxis }} = graph._fullLayout;
            return [box.x + xaxis._offset, box.y + yaxis._offset + yaxis._length / 2, xaxis._length] }}"""
    )
    page.mouse.move(left + width * 0.5, middle)
    page.mouse.down()
    page.mouse.move(left + width * 0.75, middle, steps=5)
    page.mouse.up()
    explored.settle()
    shown = f"() => {GRAPH}._fullLayout.xaxis.range"
    low, high = page.evaluate(shown)
    knob(explored, "Batch", ".noUi-handle").press("ArrowLeft")
    page.wait_for_function(f"() => {HEAD}.textContent.startsWith('Batch of 32')")
    explored.settle()
    # The same model, the same events: the same rows, but for the rounding outwards.
    assert page.evaluate(shown) == pytest.approx([low, high], abs=2)


@pytest.mark.parametrize("width", [1400, 900])
def test_nothing_overflows(explored: Any, width: int) -> None:
    explored.page.set_viewport_size({"width": width, "height": 1000})
    explored.settle()
    for selector in (".memexplore-body", ".memexplore-knobs", ".memexplore"):
        wide = f"() => {{ const e = document.querySelector('{selector}'); return e.scrollWidth - e.clientWidth }}"
        assert explored.page.evaluate(wide) <= 0
    cut = """() => [...document.querySelectorAll('.memexplore-knobs label, .memexplore-knobs button')]
        .filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"""
    assert explored.page.evaluate(cut) == []


def test_reopened_without_a_kernel_shows_image_and_sentence(explored: Any) -> None:
    knob(explored, "Batch", ".noUi-handle").press("ArrowLeft")
    wait_for(explored, Knobs(batch=32))
    explored.settle()
    explored.page.wait_for_function(
        f"""() => {{ {explored.CURRENT} const outputs = panel.content.widgets[1].model.outputs.toJSON();
            return JSON.stringify(outputs).includes('Batch of 32') }}"""
    )
    explored.save()
    explored.shut_down()
    explored.open_without_kernel()
    picture = explored.page.wait_for_selector("img[class^=memexplore-picture]", state="visible")
    assert picture is not None
    assert explored.page.get_by_text("Batch of 32: peak").filter(visible=True).count() == 1
    assert explored.page.get_by_text("Error displaying widget").filter(visible=True).count() == 0


CELL = """%%memprofile --gpu T4 --slider batch=16:64:16
batch = 32
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
model(torch.ones(batch * 256, 256, device='cuda')).sum().backward()"""


@pytest.mark.parametrize("kernel", ["newest", "6.31.0", "7.3.0"])
def test_slider_of_a_cell_on_several_kernels(
    notebook: Callable[..., Any], old_kernel: Callable[[str], str], kernel: str
) -> None:
    cells = ["import torch, time\n%load_ext memexplore", CELL, "time.sleep(1)\nprint('slept')"]
    book = notebook(*cells, kernel="python3" if kernel == "newest" else old_kernel(kernel))
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    assert book.errors() == []
    handle = knob(book, "batch", ".noUi-handle")
    handle.press("ArrowRight")
    book.page.wait_for_function(f"() => {HEAD}.textContent.includes('Batch = 48: peak')")
    # While a cell runs nothing is drawn; the requested setting is drawn after its end.
    book.start(2)
    handle.press("ArrowRight")
    book.wait(2)
    book.page.wait_for_function(f"() => {HEAD}.textContent.includes('Batch = 64: peak')")
    book.settle()
    assert book.errors() == []
    # A knob that needs a step is greyed.
    assert knob(book, "Optimizer", "select").is_disabled()
