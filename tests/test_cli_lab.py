"""`memexplore lab`, and the examples in the help of every command."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

import pytest

from memexplore.cli import commands, examples, lab, run_options
from tests.documents import REPOSITORY
from tests.test_cli import memexplore


def create_package(folder, name, text):
    """Create a package that Python finds before the installed one of the same name."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("")
    (folder / name / "__main__.py").write_text(text)


def test_lab_opens_the_first_notebook_and_passes_arguments_on(tmp_path):
    create_package(tmp_path, "jupyterlab", "import sys; print(sys.argv[1:])")
    done = memexplore("lab", "--no-browser", "--port=1234", env={"PYTHONPATH": str(tmp_path)})
    notebook = REPOSITORY / "notebooks" / "01_where_does_memory_go.ipynb"
    assert done.returncode == 0, done.stderr
    assert repr(str(notebook)) in done.stdout
    assert "'--no-browser', '--port=1234']" in done.stdout
    # The address that is printed without a browser
    assert "'--LabApp.default_url=/lab/tree/01_where_does_memory_go.ipynb'" in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_jupyterlab_which_may_take_its_time(number, tmp_path):
    ending = f"""
import signal, sys, time
def end(*_):
    time.sleep(1)
    print("ended its kernels")
    sys.exit(7)
signal.signal({int(number)}, end)
print("started", flush=True)
signal.pause()
"""
    create_package(tmp_path, "jupyterlab", ending)
    command = [sys.executable, "-m", "memexplore.cli", "lab"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "started\n"
        process.send_signal(number)
        # The pipe has an end only when JupyterLab has ended too.
        assert process.communicate(timeout=200)[0] == "ended its kernels\n"
        assert process.returncode == 7
    finally:
        process.kill()


def test_lab_without_jupyterlab_names_the_command_to_install_it(tmp_path):
    blocker = "import sys, importlib.util as u; real = u.find_spec\n"
    blocker += "u.find_spec = lambda name, *rest: None if name == 'jupyterlab' else real(name, *rest)\n"
    (tmp_path / "sitecustomize.py").write_text(blocker)
    done = memexplore("lab", env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 1
    assert 'pip install -e ".[lab]"' in done.stderr
    assert "Traceback" not in done.stderr


def test_notebooks_of_a_wheel_are_copied_and_changed_ones_stay(tmp_path):
    packed, folder = tmp_path / "packed", tmp_path / "work" / "notebooks"
    (packed / "images").mkdir(parents=True)
    for name in ("one.ipynb", "two.ipynb", "images/picture.png"):
        (packed / name).write_text("new")
    folder.mkdir(parents=True)
    (folder / "one.ipynb").write_text("changed by the reader")
    assert lab.copy_missing(packed, folder) == folder
    texts = {name: (folder / name).read_text() for name in ("one.ipynb", "two.ipynb", "images/picture.png")}
    assert texts == {"one.ipynb": "changed by the reader", "two.ipynb": "new", "images/picture.png": "new"}


@pytest.mark.parametrize("command", sorted(examples.EXAMPLES))
def test_examples_of_the_help_can_be_typed(command, capsys):
    with pytest.raises(SystemExit):
        commands.main([*filter(None, [command]), "--help"])
    printed = capsys.readouterr().out
    for line in examples.EXAMPLES[command]:
        assert f"  {line}\n" in printed
        arguments, _ = run_options.split_arguments(shlex.split(line)[1:])
        commands._parser().parse_known_args(arguments)  # ends with an error for an unknown option
