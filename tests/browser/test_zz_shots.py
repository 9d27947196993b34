import os

import pytest

pytestmark = pytest.mark.browser
TAPE = os.environ.get("E2_TAPE", "/tmp/w/e2_gpt.parquet")
CODE = os.environ.get("E2_CODE", f"import memexplore as mx\ntape = mx.Tape.load({TAPE!r})\nview = mx.view(tape)")


def test_shots(notebook):
    book = notebook(CODE, "view")
    book.run(0)
    book.run(1)
    assert book.errors() == [], book.errors()
    page = book.page
    page.wait_for_selector(".memexplore-drawn .memexplore-layer")
    book.settle()
    for theme in ("Light", "Dark"):
        page.evaluate(
            f"() => window.jupyterapp.commands.execute('apputils:change-theme', {{theme: 'JupyterLab {theme}'}})"
        )
        page.wait_for_timeout(800)
        for width in (1400, 1000, 800):
            page.set_viewport_size({"width": width, "height": 1000})
            page.evaluate("() => window.jupyterapp.shell.collapseLeft()")
            page.wait_for_timeout(700)
            book.settle()
            page.evaluate("() => document.querySelector('.memexplore').scrollIntoView({block: 'start'})")
            page.wait_for_timeout(200)
            page.screenshot(path=f"/tmp/w/e2_{os.environ.get('E2_NAME', 'view')}_{width}_{theme}.png")
    if os.environ.get("E2_TABS"):
        for tab in ("Tensors", "Lines"):
            page.set_viewport_size({"width": 1000, "height": 1000})
            page.get_by_role("tab", name=tab, exact=True).click()
            page.wait_for_timeout(300)
            book.settle()
            page.screenshot(path=f"/tmp/w/e2_{tab}.png")
