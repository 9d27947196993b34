"""Types of `Knobs`: a type checker accepts the texts of choices, and reads members of enums."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from memexplore.knobs import knobs as module
from memexplore.knobs.knobs import Knobs

SPELLINGS = """\
import memexplore as mx
from memexplore.knobs.knobs import Checkpoint, Knobs, Precision

mx.Knobs(precision="bf16", checkpoint="every 2", batch=16, gpu="T4")
Knobs(precision=Precision.BF16, checkpoint=Checkpoint.parse("sqrt"), frozen="encoder", lora=["head", "tail"])
Knobs(optimizer="Adam", update="in backward", zero_grad="set to none", memory_format="channels last", inplace="on")
Knobs(offload="saved tensors on the CPU", mode="inference", variables={"size": 4})
reveal_type(Knobs().precision)
reveal_type(Knobs(checkpoint="sqrt").checkpoint)
"""
CONFIG = """\
[mypy]
warn_unused_ignores = true
[mypy-torch.*,numpy.*,pandas.*,plotly.*,IPython.*,ipywidgets.*,anywidget.*,pyarrow.*,cloudpickle.*,traitlets.*]
follow_imports = skip
ignore_missing_imports = true
"""


def mypy(code: str, folder: Path) -> tuple[int, str]:
    """Return the exit status and the output of mypy for a file of user code."""
    (folder / "user_code.py").write_text(code)
    (folder / "mypy.ini").write_text(CONFIG)
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--follow-imports=silent", "user_code.py"]
    path = str(Path(module.__file__).parents[2])
    environment = {"MYPYPATH": path, "PATH": "", "HOME": str(folder)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return run.returncode, run.stdout + run.stderr


def test_mypy_accepts_the_texts_of_choices_and_no_other_and_reads_enums(tmp_path: Path) -> None:
    status, output = mypy(SPELLINGS + 'Knobs(precision="bf61")\n', tmp_path)
    wrong = SPELLINGS.count("\n") + 1
    errors = [line for line in output.splitlines() if " error: " in line]
    assert status == 1, output
    assert len(errors) == 1, output
    assert errors[0].startswith(f'user_code.py:{wrong}: error: Argument "precision" to "Knobs" has incompatible type')
    assert re.findall(r'Revealed type is "(?:[\w.]*\.)?(\w+)"', output) == ["Precision", "Checkpoint"]


@pytest.mark.parametrize("field", Knobs.CHOICES)
def test_literal_type_lists_all_texts_of_a_choice(field: str) -> None:
    choices = Knobs.CHOICES[field]
    assert get_args(getattr(module, f"{choices.__name__}Text")) == tuple(choice.value for choice in choices)
