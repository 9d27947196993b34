"""torchtitan's own `train.py` on the virtual GPU, with a tokenizer and a text that need no download.

The published peaks do not depend on them: batches have a fixed number of tokens, and the vocabulary its real size.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys

COMMIT = "9dec370"
"""Of December 26, 2024, which the benchmark names."""
PUBLISHED = {8: "82.4", 128: "67.0"}
"""Number of GPUs -> GiB reserved, FSDP without torch.compile (tables 1 and 3 of the benchmark)."""
_VOCABULARY = 128_000
"""Tokens of the Llama 3 tokenizer without its 256 special ones."""
_OPTIONS = (
    "--job.config_file train_configs/llama3_8b.toml --training.batch_size 2 --training.dataset c4_test "
    "--training.steps 3 --metrics.log_freq 1 --profiling.enable_profiling"
).split()


def reserved(folder: pathlib.Path, world: int) -> str:
    """Return the GiB that the log of the last step says, as printed with one digit.

    Raises RuntimeError if the run prints none.
    """
    _write_stand_ins(folder)
    # An H100 of this benchmark has 96 GB.
    command = [sys.executable, "-m", "memexplore", "run", "train.py", "--gpu", "96GiB", "--world", str(world)]
    repository = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (repository, os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [*command, "--release", "2.6", "--", *_OPTIONS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    found = re.findall(r"memory:\s*([\d.]+)GiB", ended.stdout + ended.stderr)
    if not found:
        raise RuntimeError(f"torchtitan printed no memory: {ended.stderr[-2000:]}")
    return f"{float(found[-1]):.1f}"


def _write_stand_ins(folder: pathlib.Path) -> None:
    tokenizer = folder / "torchtitan/datasets/tokenizer/original/tokenizer.model"
    tokenizer.parent.mkdir(parents=True, exist_ok=True)
    pieces = itertools.chain.from_iterable(
        map(bytes, itertools.product(range(256), repeat=length)) for length in (1, 2, 3)
    )
    lines = (base64.b64encode(piece) + b" %d\n" % rank for rank, piece in enumerate(pieces))
    tokenizer.write_bytes(b"".join(itertools.islice(lines, _VOCABULARY)))
    text = folder / "tests/assets/c4_test/data.json"
    text.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps({"text": "the quick brown fox jumps over the lazy dog " * 400, "timestamp": "", "url": ""})
    text.write_text(200 * f"{line}\n")
