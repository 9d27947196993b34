"""The explorer in a real JupyterLab: every control by keyboard and by mouse, and the drawn figures."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest

from memexplore.run.knobs.knobs import Knobs
from memexplore.run.sentences import percent_text
from tests.browser.explored import GRAPH, choose, hold, knob, ran, reset, wait_for
from tests.browser.waiting import expect

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
    Turn("In place", "ArrowDown", Knobs(inplace="on"), "off (as written)", Knobs()),
    Turn("Checkpoint", "ArrowDown", Knobs(checkpoint="every 1"), "√N segments", Knobs(checkpoint="sqrt")),
    Turn("Optimizer", "ArrowDown", Knobs(optimizer="SGD"), "Adafactor", Knobs(optimizer="Adafactor")),
    Turn("Update", "ArrowDown", Knobs(update="fused"), "in backward", Knobs(update="in backward")),
    Turn("Zero grad", "ArrowDown", Knobs(zero_grad="set to zero"), "to None (as written)", Knobs()),
    Turn(
        "Memory format",
        "ArrowDown",
        Knobs(memory_format="channels last"),
        "channels last",
        Knobs(memory_format="channels last"),
    ),
    Turn(
        "Offload",
        "ArrowDown",
        Knobs(offload="saved tensors on the CPU"),
        "saved tensors on the CPU",
        Knobs(offload="saved tensors on the CPU"),
    ),
    Turn("Mode", "ArrowDown", Knobs(mode="inference"), "inference", Knobs(mode="inference")),
    Turn("GPU", "ArrowDown", Knobs(gpu="RTX 5080"), "A100 40GB", Knobs(gpu="A100 40GB")),
    Turn(
        "Max split size",
        "ArrowDown",
        Knobs(settings="max_split_size_mb:20"),
        "64 MiB",
        Knobs(settings="max_split_size_mb:64"),
    ),
    Turn(
        "Roundup divisions",
        "ArrowDown",
        Knobs(settings="roundup_power2_divisions:2"),
        "8 steps",
        Knobs(settings="roundup_power2_divisions:8"),
    ),
    Turn(
        "Collection threshold",
        "ArrowDown",
        Knobs(settings="garbage_collection_threshold:0.5"),
        "80 %",
        Knobs(settings="garbage_collection_threshold:0.8"),
    ),
]
SLIDERS = {
    # The next smaller power of two, the next divisor, and a quarter less; then what lies at the right end.
    "Batch": ("ArrowLeft", Knobs(batch=32), Knobs(batch=1024)),
    "Accumulation": ("ArrowRight", Knobs(accumulation=2), Knobs(accumulation=64)),
    "Input size": ("ArrowLeft", Knobs(input_size=24), Knobs(input_size=64)),
}
SWITCHES = {
    "Expandable segments": EXPANDABLE,
}
LINES = {
    "Checkpoint layers": ("1 2", Knobs(checkpoint="layers 1 2")),
    "Frozen": ("1 2", Knobs(frozen=("1", "2"))),
    "LoRA": ("7", Knobs(lora="7")),
}


def test_every_knob_by_keyboard(explored: Any) -> None:
    for turn in CHOICES:
        knob(explored, turn.label).press(turn.key)
        wait_for(explored, turn.by_key)
        reset(explored)
    for label, (key, knobs, _) in SLIDERS.items():
        knob(explored, label).press(key)
        wait_for(explored, knobs)
        reset(explored)
    for label, knobs in SWITCHES.items():
        knob(explored, label).press("Space")
        wait_for(explored, knobs)
        reset(explored)
    for label, (names, knobs) in LINES.items():
        line = knob(explored, label)
        line.press_sequentially(names)
        line.press("Enter")
        wait_for(explored, knobs)
        if label == "LoRA":
            explored.settle()
            knob(explored, "LoRA rank").press("ArrowRight")
            wait_for(explored, Knobs(lora="7", lora_rank=16))
        reset(explored)


def test_every_knob_by_mouse(explored: Any) -> None:
    for turn in CHOICES:
        choose(explored, turn.label, turn.choice)
        wait_for(explored, turn.by_mouse)
        reset(explored)
    for label, (_, _, knobs) in SLIDERS.items():
        slider = knob(explored, label)
        slider.scroll_into_view_if_needed()
        track = slider.bounding_box()
        explored.page.mouse.click(track["x"] + track["width"] - 2, track["y"] + track["height"] / 2)
        wait_for(explored, knobs)
        reset(explored)
    for label, knobs in SWITCHES.items():
        knob(explored, label).click()
        wait_for(explored, knobs)
        reset(explored)


def test_button_checkpoints_the_clicked_layer(explored: Any) -> None:
    explored.page.get_by_role("treeitem", name=re.compile("^7, ")).click()
    take = explored.page.locator(".memexplore-selected").get_by_role("button", name="Checkpoint", exact=True)
    take.click()
    wait_for(explored, Knobs(checkpoint="layers 7"))
    explored.settle()
    assert take.get_attribute("aria-pressed") == "true"
    explored.run(3)
    assert explored.text(3) == "checkpoint layers 7\n"


def test_a_setting_that_fails_is_taken_back_with_the_reason_beside_it(explored: Any) -> None:
    choose(explored, "Precision", "bf16 autocast")
    wait_for(explored, Knobs(precision="bf16"))
    line = knob(explored, "Frozen")
    explored.settle()
    top = explored.page.evaluate(f"() => {GRAPH}.getBoundingClientRect().top")
    line.fill("nowhere")
    line.press("Enter")
    problem = explored.page.locator("[data-field=frozen] .memexplore-knob-problem")
    expect(problem).to_contain_text("nowhere")
    # Nothing has moved, and nothing but the field that failed is taken back.
    assert explored.page.evaluate(f"() => {GRAPH}.getBoundingClientRect().top") == top
    wait_for(explored, Knobs(precision="bf16"))
    # The next change works, and the reason goes.
    choose(explored, "Optimizer", "SGD")
    wait_for(explored, Knobs(precision="bf16", optimizer="SGD"))
    explored.settle()
    assert problem.inner_text() == ""


def test_last_value_of_a_fast_slider_stays(explored: Any) -> None:
    for _ in range(6):
        knob(explored, "Batch").press("ArrowLeft")
    # 64, 32, 16, 8, 4, 2, 1
    wait_for(explored, Knobs(batch=1))
    explored.settle()
    assert knob(explored, "Batch").get_attribute("aria-valuetext") == "1 sample"


def test_a_held_key_is_one_change_that_can_be_undone_and_redone(explored: Any) -> None:
    knob(explored, "Batch").focus()
    hold(explored, "ArrowLeft", 5)
    wait_for(explored, Knobs(batch=2))
    explored.settle()
    undo, redo = (explored.page.get_by_role("button", name=name, exact=True) for name in ("Undo", "Redo"))
    undo.click()
    wait_for(explored, Knobs())
    explored.settle()
    assert undo.is_disabled()
    redo.click()
    wait_for(explored, Knobs(batch=2))


def test_changes_are_given_against_the_step_as_written_and_the_pinned_setting(explored: Any) -> None:
    page = explored.page
    choose(explored, "Precision", "bf16 autocast")
    wait_for(explored, Knobs(precision="bf16"))
    page.get_by_role("button", name="Pin", exact=True).click()
    page.get_by_role("button", name="Unpin", exact=True).wait_for()
    choose(explored, "Optimizer", "SGD")
    pinned = Knobs(precision="bf16")
    wait_for(explored, Knobs(precision="bf16", optimizer="SGD"), pinned)
    explored.settle()
    written, middle, now = (
        ran(knobs).outcome.peak_allocated for knobs in (Knobs(), pinned, pinned.replace(optimizer="SGD"))
    )
    text = page.locator(".memexplore-against").inner_text()
    assert text == f"peak vs written {percent_text(now / written)} · vs pinned {percent_text(now / middle)}"
    page.locator(".memexplore-change", has_text="Precision").click()
    wait_for(explored, Knobs(optimizer="SGD"), pinned)


def test_nothing_moves_while_knobs_turn(explored: Any) -> None:
    places = """() => ['timeline', 'lower', 'knobs', 'changes'].map(name =>
        document.querySelector(`.memexplore-${name}`).getBoundingClientRect().top)"""
    before = explored.page.evaluate(places)
    for knobs, label, option in [
        (Knobs(precision="bf16"), "Precision", "bf16 autocast"),
        (Knobs(precision="bf16", checkpoint="every 1"), "Checkpoint", "every block"),
        (Knobs(precision="bf16", checkpoint="every 1", gpu="H200"), "GPU", "H200"),
    ]:
        choose(explored, label, option)
        wait_for(explored, knobs)
        explored.settle()
        assert explored.page.evaluate(places) == before


def test_keys_reach_a_knob_where_shortcuts_take_keys_first(explored: Any) -> None:
    """Notebook 7 handles shortcuts before an element gets the key, except where it has Lumino's attribute."""
    explored.page.evaluate("""() => document.addEventListener('keydown', event => {
        if (!event.target.hasAttribute('data-lm-suppress-shortcuts')) {
            event.preventDefault();
            event.stopImmediatePropagation();
            window.taken = event.key;
        } }, true)""")
    knob(explored, "Batch").press("ArrowLeft")
    wait_for(explored, Knobs(batch=32))
    explored.page.keyboard.press("Control+s")
    assert explored.page.evaluate("() => window.taken") in ("Control", "s")


def test_history_code_and_trade_offs(explored: Any) -> None:
    page = explored.page
    choose(explored, "Precision", "bf16 autocast")
    wait_for(explored, Knobs(precision="bf16"))
    page.get_by_role("tab", name="Code", exact=True).click()
    page.wait_for_function("() => document.querySelector('.memexplore-code')?.textContent.includes('torch.bfloat16')")
    page.get_by_role("tab", name="Trade-offs", exact=True).click()
    page.wait_for_function(
        "() => document.querySelector('.memexplore-figure')?.querySelectorAll('.scatterlayer .point').length === 2"
    )
    page.get_by_role("tab", name="History", exact=True).click()
    page.locator(".memexplore-pick", has_text="as written").filter(visible=True).press("Enter")
    wait_for(explored, Knobs())
    rows = page.locator(".memexplore-settings tbody tr").filter(visible=True)
    current = "document.querySelector('.memexplore-settings [aria-current] .memexplore-pick').textContent"
    page.wait_for_function(f"() => {current} === 'as written'")
    assert rows.count() == 2


def test_skipped_sites_are_on_the_screen(explored: Any) -> None:
    choose(explored, "Checkpoint", "norms, activations")
    knobs = Knobs(checkpoint="norms")
    wait_for(explored, knobs)
    skipped = ran(knobs).applied.skipped
    assert skipped
    explored.page.locator(".memexplore-applied summary").click()
    for entry in skipped:
        explored.page.get_by_text(f"{entry.site}: {entry.reason}").wait_for()


def test_lines_can_be_copied(explored: Any) -> None:
    page = explored.page
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    choose(explored, "Optimizer", "SGD")
    wait_for(explored, Knobs(optimizer="SGD"))
    explored.settle()
    page.get_by_role("tab", name="Code", exact=True).click()
    # The tabs follow the tables, after which the page is no longer busy.
    page.wait_for_function("() => document.querySelector('.memexplore-code')?.textContent.includes('torch.optim.SGD(')")
    shown = page.locator(".memexplore-code").inner_text().split("\n")
    page.get_by_role("button", name="Copy", exact=True).click()
    page.get_by_role("button", name="Copied", exact=True).wait_for()
    copied = page.evaluate("() => navigator.clipboard.readText()").strip().split("\n")
    # The kept and added lines of the diff, without their signs.
    assert copied == [line[2:] for line in shown if line and line[0] != "-"]
    assert any(line.startswith("+ optimizer = torch.optim.SGD(") for line in shown)


def test_what_would_fit(explored: Any) -> None:
    page = explored.page
    page.get_by_role("button", name="What would fit?").click()
    page.get_by_text("As written it needs").filter(visible=True).wait_for(timeout=240_000)
    # The first row is the step as it is, in force.
    first = page.locator(".memexplore-settings tbody tr").filter(visible=True).first
    assert first.locator(".memexplore-pick").inner_text() == "as written"
    assert first.get_attribute("aria-current") == "true"


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
    knob(explored, "Batch").press("ArrowLeft")
    wait_for(explored, Knobs(batch=32))
    explored.settle()
    # The same model, the same events: the same rows, but for the rounding outwards.
    assert page.evaluate(shown) == pytest.approx([low, high], abs=2)


@pytest.mark.parametrize("width", [1400, 1000, 800])
def test_nothing_overflows(explored: Any, width: int) -> None:
    knob(explored, "Frozen")  # opens the other knobs
    explored.page.set_viewport_size({"width": width, "height": 1000})
    explored.settle()
    for selector in (".memexplore", ".memexplore-verdict", ".memexplore-knobs", ".memexplore-lower"):
        wide = f"() => {{ const e = document.querySelector('{selector}'); return e.scrollWidth - e.clientWidth }}"
        assert explored.page.evaluate(wide) <= 0
    cut = """() => [...document.querySelectorAll('.memexplore-knob-label, .memexplore button')]
        .filter(e => !e.closest('.memexplore-gpu') && e.scrollWidth > e.clientWidth + 1).map(e => e.textContent)"""
    assert explored.page.evaluate(cut) == []


@pytest.mark.parametrize(
    ("width", "parts"),
    [
        (1400, [".memexplore-verdict", ".memexplore-primary", ".memexplore-timeline", ".memexplore-main"]),
        (800, [".memexplore-verdict", "[data-field=batch]", ".memexplore-timeline"]),
    ],
)
def test_knob_and_effect_share_a_screen(explored: Any, width: int, parts: list[str]) -> None:
    page = explored.page
    page.set_viewport_size({"width": width, "height": 1000})
    page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
    explored.settle()
    page.evaluate("() => document.querySelector('.memexplore').scrollIntoView({ block: 'start' })")
    seen = """parts => { const scroller = document.querySelector('.jp-WindowedPanel-outer').getBoundingClientRect();
        return parts.map(part => document.querySelector(part).getBoundingClientRect())
            .map(box => box.top >= scroller.top - 1 && box.bottom <= scroller.bottom + 1) }"""
    assert page.evaluate(seen, parts) == [True] * len(parts)


def test_longest_sentence_of_a_transformer_has_two_lines_on_a_wide_page(explored: Any) -> None:
    page = explored.page
    page.evaluate("() => { document.querySelector('.memexplore').style.width = '1190px' }")  # of a page of 1400 pixels
    explored.settle()
    sentence = (  # of GPT-2 with a batch of 8 on a T4
        "Peak 14.6 GiB allocated\xa0· 69\xa0% activations, 21\xa0% temporaries: "
        "try checkpointing or mixed precision\xa0· stops in step 2, backward of GPT2LMHeadModel "
        "(aten::_log_softmax_backward_data, 1.53 GiB)\xa0· predicted, torch\xa02.13"
    )
    lines = page.locator(".memexplore-detail").evaluate(
        """(detail, sentence) => { detail.textContent = sentence;
            return detail.offsetHeight / parseFloat(getComputedStyle(detail).lineHeight) }""",
        sentence,
    )
    assert lines == 2


def test_empty_advice_takes_little_room_on_a_narrow_page(explored: Any) -> None:
    page = explored.page
    page.set_viewport_size({"width": 800, "height": 1000})
    explored.settle()
    side = page.locator(".memexplore-side .memexplore-panel:visible")
    assert side.bounding_box()["height"] < 200
    page.get_by_role("tab", name="Trade-offs", exact=True).click()
    page.wait_for_selector(".memexplore-side .js-plotly-plot")
    explored.settle()
    assert side.bounding_box()["height"] == 320


def test_reopened_without_a_kernel_shows_image_and_sentence(explored: Any) -> None:
    knob(explored, "Batch").press("ArrowLeft")
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
    assert explored.page.get_by_text("Batch of 32").filter(visible=True).count() == 1
    assert explored.page.get_by_text("Error displaying widget").filter(visible=True).count() == 0


def test_code_breaks_no_name(explored: Any) -> None:
    knob(explored, "Batch").press("ArrowLeft")
    wait_for(explored, Knobs(batch=32))
    explored.settle()
    explored.page.get_by_role("tab", name="Code", exact=True).click()
    # The tabs follow the tables, after which the page is no longer busy.
    explored.page.wait_for_function("() => document.querySelectorAll('.memexplore-code > span').length > 2")
    heights = explored.page.evaluate(
        """() => [...document.querySelectorAll('.memexplore-code > span')]
            .map(line => line.getBoundingClientRect().height)"""
    )
    # The comment and the line of the DataLoader are longer than the panel; they scroll.
    assert len(heights) > 2
    assert len({round(height) for height in heights}) == 1
