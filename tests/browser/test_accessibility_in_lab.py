"""Keyboard, screen readers and themes: roles of tabs, live regions, and colours that follow the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memexplore.run.knobs.knobs import Knobs
from tests.browser.explored import choose, expected, wait_for

pytestmark = pytest.mark.browser

SET_UP = "import memexplore as mx\nfrom tests.sample_tapes import training_tape\nview = mx.view(training_tape())"
ACTIVE = "() => document.activeElement.textContent"
STATUS = ".memexplore-live[role=status]"


@pytest.fixture
def shown(notebook: Callable[..., Any]) -> Any:
    """A notebook with a view on the screen, and a cell that moves its cursor."""
    book = notebook(SET_UP, "view", "view.cursor = 1000")
    book.run(0)
    book.run(1)
    book.page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    return book


def open_tab(book: Any) -> tuple[str, str]:
    """Return the name of the open tab, and the label of the only visible panel."""
    return tuple(
        book.page.evaluate(
            """() => { const [tab, ...others] = document.querySelectorAll('.memexplore [role=tab][aria-selected=true]');
                const panels = [...document.querySelectorAll('.memexplore [role=tabpanel]')].filter(e => !e.hidden);
                if (others.length || panels.length !== 1) throw new Error('not one tab and one panel');
                const label = panels[0].getAttribute('aria-labelledby');
                return [tab.textContent, document.getElementById(label).textContent] }"""
        )
    )


def test_every_tab_controls_its_panel(shown: Any) -> None:
    tabs = shown.page.evaluate(
        """() => [...document.querySelectorAll('.memexplore [role=tablist] > *')].map(tab => {
            const panel = document.getElementById(tab.getAttribute('aria-controls'));
            return [tab.getAttribute('role'), panel.getAttribute('role'),
                    panel.getAttribute('aria-labelledby') === tab.id] })"""
    )
    assert tabs == [["tab", "tabpanel", True]] * 5


def test_arrows_home_and_end_open_tabs(shown: Any) -> None:
    page = shown.page
    page.get_by_role("tab", name="Layers", exact=True).focus()
    # Growth is hidden: nothing grows in this tape.
    for key, name in [
        ("ArrowRight", "Tensors"),
        ("ArrowRight", "Lines"),
        ("End", "Blocks"),
        ("ArrowRight", "Layers"),
        ("ArrowLeft", "Blocks"),
        ("Home", "Layers"),
    ]:
        page.keyboard.press(key)
        assert page.evaluate(ACTIVE) == name
        assert open_tab(shown) == (name, name)


def test_tab_key_stops_once_in_the_list_and_goes_on_to_search_and_panel(shown: Any) -> None:
    page = shown.page
    page.get_by_role("tab", name="Tensors", exact=True).click()
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.type") == "search"
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.getAttribute('role')") == "tabpanel"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Shift+Tab")
    assert page.evaluate(ACTIVE) == "Tensors"
    stops = "() => [...document.querySelectorAll('.memexplore [role=tab]')].filter(tab => tab.tabIndex === 0).length"
    assert page.evaluate(stops) == 1


def test_buttons_over_the_timeline_are_one_tab_stop(shown: Any) -> None:
    page = shown.page
    buttons = "[...document.querySelectorAll('.memexplore-timeline .modebar-btn')]"
    assert page.evaluate(f"() => {buttons}.map(button => button.tabIndex)") == [0, -1, -1, -1, -1, -1]
    page.evaluate(f"() => {buttons}[0].focus()")
    for key, number in (("ArrowRight", 1), ("End", 5), ("ArrowRight", 0), ("ArrowLeft", 5)):
        page.keyboard.press(key)
        assert page.evaluate(f"() => {buttons}.indexOf(document.activeElement)") == number
    # Pressing one redraws; there is still one stop.
    page.keyboard.press("Enter")
    shown.settle()
    assert page.evaluate(f"() => {buttons}.filter(button => button.tabIndex === 0).length") == 1


def test_cursor_and_selection_are_announced(shown: Any) -> None:
    region = shown.page.locator(STATUS)
    shown.run(2)
    shown.page.wait_for_function(f"() => document.querySelector('{STATUS}').textContent.endsWith(' · event 1,000')")
    shown.page.locator(".memexplore-layer", has_text="encoder").first.click()
    shown.page.wait_for_function(f"() => document.querySelector('{STATUS}').textContent === 'encoder is highlighted.'")
    # Invisible, but not hidden from screen readers.
    box = region.bounding_box()
    assert (box["width"], box["height"]) == (1, 1)


def test_verdict_of_a_changed_setting_is_announced(explored: Any) -> None:
    choose(explored, "Precision", "bf16 autocast")
    wait_for(explored, Knobs(precision="bf16"))
    wanted = expected(Knobs(precision="bf16"))["headline"]
    explored.page.wait_for_function(
        f"text => document.querySelector('{STATUS}').textContent.startsWith(text)", arg=wanted
    )


def test_knobs_have_names_values_with_units_and_few_tab_stops(explored: Any) -> None:
    page = explored.page
    slider = page.get_by_role("slider", name="Batch", exact=True)
    assert slider.get_attribute("aria-valuetext") == "64 samples"
    for label in ("Precision", "Checkpoint", "Optimizer", "GPU"):
        page.get_by_role("combobox", name=label, exact=True).wait_for()
    slider.press("ArrowLeft")
    wait_for(explored, Knobs(batch=32))
    explored.settle()
    # One stop for all buttons of the row of changes; arrow keys move between them.
    page.locator(".memexplore-change").focus()
    page.keyboard.press("ArrowRight")
    assert page.evaluate(ACTIVE) == "Pin"
    page.keyboard.press("Tab")
    assert page.evaluate("() => document.activeElement.labels[0].textContent") == "Batch"
    # Delete returns a knob to the step as written.
    page.keyboard.press("Delete")
    wait_for(explored, Knobs())


def test_disabled_knob_has_its_reason(explored: Any) -> None:
    page = explored.page
    page.locator(".memexplore-more").click()
    rank = page.get_by_role("slider", name="LoRA rank", exact=True)
    assert rank.is_disabled()
    described = "knob => document.getElementById(knob.getAttribute('aria-describedby')).textContent"
    assert "No layer has LoRA" in rank.evaluate(described)


CONTRAST = """() => {
    const luminance = colour => { const [r, g, b] = colour.map(v => v / 255).map(
        v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b };
    const parse = text => text.match(/[\\d.]+/g).map(Number);
    const ground = element => { for (let e = element; e; e = e.parentElement) {
        const [r, g, b, a = 1] = parse(getComputedStyle(e).backgroundColor); if (a > 0.99) return [r, g, b] }
        return [255, 255, 255] };
    const found = [];
    for (const element of document.querySelectorAll('.memexplore *')) {
        const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
        const style = getComputedStyle(element);
        if (!own || element.closest('svg, :disabled, [aria-pressed=false]') || !element.checkVisibility()) continue;
        const below = ground(element), [r, g, b, a = 1] = parse(style.color);
        const over = [r, g, b].map((v, i) => v * a + below[i] * (1 - a));
        const [low, high] = [luminance(over), luminance(below)].sort((x, y) => x - y);
        const ratio = (high + 0.05) / (low + 0.05);
        if (ratio < 4.5) found.push([element.className, element.textContent.slice(0, 30), ratio]);
    }
    return found }"""


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_all_text_is_legible(explored: Any, theme: str) -> None:
    explored.page.evaluate("theme => window.jupyterapp.commands.execute('apputils:change-theme', { theme })", theme)
    dark = theme.endswith("Dark")
    explored.page.wait_for_function(f"theme => ({THEME})() === theme", arg="dark" if dark else "light")
    choose(explored, "Precision", "bf16 autocast")
    wait_for(explored, Knobs(precision="bf16"))
    explored.page.locator(".memexplore-more").click()
    for tab in ("History", "Code", "Tensors", "Lines"):
        explored.page.get_by_role("tab", name=tab, exact=True).click()
        explored.settle()
        assert explored.page.evaluate(CONTRAST) == []


MARK = """mark => { const [where, name, value] = mark; const part = document[where];
    if (name === 'class') part.classList.toggle(value); else part.setAttribute(name, value) }"""
THEME = "() => document.querySelector('.memexplore').dataset.memexploreTheme"
TICKS = "() => getComputedStyle(document.querySelector('.memexplore-timeline .xtick text')).fill"
# Colours are those of the fallbacks where the page defines none.
WITHOUT_COLOURS = """() => { const names = ['--jp-content-font-color1', '--jp-layout-color1'];
    for (const part of [document.documentElement, document.body])
        for (const name of names) part.style.setProperty(name, 'initial') }"""


@pytest.mark.parametrize(
    ("where", "name", "dark", "light"),
    [
        ("body", "data-jp-theme-light", "false", "true"),
        ("documentElement", "data-jp-theme-light", "false", "true"),
        ("body", "data-vscode-theme-kind", "vscode-dark", "vscode-light"),
        ("documentElement", "data-theme", "dark", "light"),
    ],
)
def test_theme_of_the_page_is_followed_while_it_changes(
    shown: Any, where: str, name: str, dark: str, light: str
) -> None:
    page = shown.page
    page.evaluate("() => document.body.removeAttribute('data-jp-theme-light')")
    page.evaluate(WITHOUT_COLOURS)
    fills = {"dark": "rgb(230, 230, 230)", "light": "rgb(33, 33, 33)"}  # #e6e6e6 and #212121 of colours.css
    for theme, value in [("dark", dark), ("light", light)]:
        page.evaluate(MARK, [where, name, value])
        page.wait_for_function(f"theme => ({THEME})() === theme", arg=theme)
        page.wait_for_function(f"fill => ({TICKS})() === fill", arg=fills[theme])


def test_preference_of_the_system_decides_on_a_page_without_a_theme(shown: Any) -> None:
    page = shown.page
    page.evaluate("() => document.body.removeAttribute('data-jp-theme-light')")
    page.evaluate(
        """() => { for (let e = document.querySelector('.memexplore').parentElement; e; e = e.parentElement)
            e.style.setProperty('background', 'transparent', 'important') }"""
    )
    for scheme in ("dark", "light", "dark"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_function(f"theme => ({THEME})() === theme", arg=scheme)
