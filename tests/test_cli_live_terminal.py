"""`memexplore run --live` in a terminal: what the program prints stays, and the run is shown below it."""

from __future__ import annotations

import signal

import pytest

from tests.screens import terminal
from tests.test_cli_live import write  # noqa: F401  (a fixture)

PRINTING = """
    import os
    for number in range(1, 31):
        step()
        print("line", number)
        time.sleep(0.05)
    while not os.path.exists("seen"):
        time.sleep(0.05)
"""
"""Prints 30 lines, and goes on until the test has seen the screen."""


def below_the_rule(screen):
    lines = screen.lines()
    rule = max(number for number, line in enumerate(lines) if line.startswith("────"))
    return lines[:rule], lines[rule + 1 :]


def states(lines):
    return [line for line in lines if line.startswith("● step ")]


def test_a_terminal_shows_the_run_below_the_output(write):  # noqa: F811
    path = write(PRINTING)
    with terminal("run", path, "--live", "--gpu", "T4", cwd=path.parent) as screen:
        screen.wait_for("Peak allocated")
        screen.wait_until(lambda _: any(line.startswith("line ") for line in below_the_rule(screen)[0]))
        _, below = below_the_rule(screen)
        assert below[0].startswith("● step ")
        assert "virtual Tesla T4" in below[0]
        (path.parent / "seen").touch()
        assert screen.wait() == 0
        everything = screen.everything()
    # All lines of the program are there in their order, and the rule is gone.
    assert [line for line in everything if line.startswith("line ")] == [f"line {n}" for n in range(1, 31)]
    assert not any(line.startswith("────") for line in everything)
    assert any(line.startswith("■ ended · step 30") for line in everything)


def test_the_steps_move_in_place(write):  # noqa: F811
    path = write("while True:\n    step()\n    time.sleep(0.02)\n")
    with terminal("run", path, "--live", "--gpu", "T4") as screen:
        screen.wait_for("Peak allocated")
        first = below_the_rule(screen)[1][0]
        screen.wait_until(lambda lines: len(steps := states(lines)) == 1 and steps != [first])


def test_a_progress_bar_stays_on_its_line(write):  # noqa: F811
    path = write("""
        from tqdm import tqdm
        for _ in tqdm(range(60), ncols=60):
            step()
            time.sleep(0.05)
        print("trained")
    """)
    with terminal("run", path, "--live", "--gpu", "T4") as screen:
        screen.wait_for("Peak allocated")
        screen.read(1.0)
        screen.wait_until(lambda lines: sum("it/s" in line for line in lines) == 1)
        assert screen.wait() == 0
        bars = [line for line in screen.everything() if "60/60" in line]
        assert len(bars) == 1
        assert bars[0].startswith("100%|")


def test_output_of_child_processes_stays_readable(write):  # noqa: F811
    path = write("""
        import subprocess
        for number in range(20):
            step()
            subprocess.run(["echo", f"child {number}"])
            time.sleep(0.05)
    """)
    with terminal("run", path, "--live", "--gpu", "T4") as screen:
        assert screen.wait() == 0
        lines = [line for line in screen.everything() if line.startswith("child ")]
    assert lines == [f"child {number}" for number in range(20)]


def test_an_interrupt_leaves_the_last_state(write):  # noqa: F811
    # It comes while the program sleeps: Python drops an interrupt in a callback of its own or of torch.
    path = write("for _ in range(10):\n    step()\nwhile True:\n    time.sleep(0.02)\n")
    with terminal("run", path, "--live", "--gpu", "T4", cwd=path.parent) as screen:
        screen.wait_for("Peak allocated")
        screen.interrupt()
        assert screen.wait() == 130
        text = "\n".join(screen.everything())
    assert "✖ failed · step " in text
    assert "KeyboardInterrupt (train.py:" in text
    assert text.count("Peak allocated") == 1
    # The whole screen scrolls again.
    assert screen.screen.margins is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_program_gives_the_terminal_back(write, number):  # noqa: F811
    # A worker that outlives its parent for a while does not delay it.
    path = write("""
        import multiprocessing
        multiprocessing.get_context("fork").Process(target=time.sleep, args=(30,), daemon=True).start()
        while True:
            step()
            time.sleep(0.02)
    """)
    with terminal("run", path, "--live", "--gpu", "T4", cwd=path.parent) as screen:
        screen.wait_for("Peak allocated")
        assert screen.screen.margins is not None
        screen.process.send_signal(number)
        assert screen.process.wait(60) == -number
        screen.wait_until(lambda _: screen.screen.margins is None)
        # The rows are empty, and a prompt comes where the output of the program ended.
        screen.wait_until(lambda lines: not any("Peak allocated" in line for line in lines))
        screen.wait_until(lambda _: screen.screen.cursor.y < 4)


def test_the_guard_of_the_terminal_is_no_child_of_the_program(write):  # noqa: F811
    path = write("""
        import signal, psutil
        step()
        print(psutil.Process().children(), signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
    """)
    with terminal("run", path, "--live", "--gpu", "T4") as screen:
        assert screen.wait() == 0
        lines = screen.everything()
    assert "[] True" in lines


def test_an_exception_leaves_the_last_state_below_its_traceback(write):  # noqa: F811
    path = write("""
        for _ in range(20):
            step()
            time.sleep(0.05)
        raise ValueError("the data ended")
    """)
    with terminal("run", path, "--live", "--gpu", "T4", cwd=path.parent) as screen:
        assert screen.wait() == 1
        text = "\n".join(screen.everything())
    assert text.index("ValueError: the data ended\n") < text.index("✖ failed · step ")


@pytest.mark.parametrize(("columns", "rows"), [(160, 50), (40, 8)])
def test_terminals_of_any_size(write, columns, rows):  # noqa: F811
    path = write(PRINTING)
    with terminal("run", path, "--live", "--gpu", "T4", columns=columns, rows=rows, cwd=path.parent) as screen:
        screen.wait_for("● step ")
        screen.wait_for("────")
        _, below = below_the_rule(screen)
        assert all(len(line) <= columns for line in below)
        (path.parent / "seen").touch()
        assert screen.wait() == 0
        lines = [line for line in screen.everything() if line.startswith("line ")]
    assert lines == [f"line {n}" for n in range(1, 31)]


def test_a_terminal_may_change_its_size(write):  # noqa: F811
    path = write(PRINTING)
    with terminal("run", path, "--live", "--gpu", "T4", cwd=path.parent) as screen:
        screen.wait_for("Peak allocated")
        screen.resize(70, 40)
        # The emulator forgets the rows that scroll, until the program has set those of the new size.
        screen.wait_until(lambda _: screen.screen.margins is not None)
        screen.wait_until(lambda lines: lines.count("─" * 70) == 1 and len(states(lines)) == 1)
        _, below = below_the_rule(screen)
        assert below[0].startswith("● step ")
        assert screen.screen.margins.bottom < 40
        (path.parent / "seen").touch()
        assert screen.wait() == 0
    assert screen.screen.margins is None
