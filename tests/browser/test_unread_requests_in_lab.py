"""Kernels with ipykernel 7.0 to 7.3 read requests that arrive while they reply to another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser

# A request during the reply to another one, again and again; the number of rounds whose replies came within a minute.
ROUNDS = """async rounds => {
    const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
    const sleep = milliseconds => new Promise(done => setTimeout(done, milliseconds));
    for (let round = 0; round < rounds; round += 1) {
        const first = kernel.requestExecute({ code: '1', silent: true }).done.catch(() => {});
        await sleep(round % 8);
        const second = kernel.requestCommInfo({ target_name: 'none' }).catch(() => {});
        const isRead = Promise.all([first, second]).then(() => true);
        if (!await Promise.race([isRead, sleep(60_000).then(() => false)])) return round;
    }
    return rounds }"""


def test_requests_during_a_reply_are_read(notebook: Callable[..., Any], old_kernel: Callable[[str], str]) -> None:
    book = notebook("%load_ext memexplore", kernel=old_kernel("7.3.0"))
    book.run(0)
    # Without the extension a kernel reads no more requests after 5 to 60 rounds.
    assert book.page.evaluate(ROUNDS, 300) == 300
