"""Training of ordinary models on a GPU: `python -m tests.gpu.zoo [NAME ...]` prints measured and predicted peaks.

On a machine with a GPU the models are trained there, each in its own process, and the peaks are written to
tests/data/zoo_*.json; elsewhere those peaks are compared with predictions. The models are built from configurations
(transformers), for three steps with AdamW, in four precisions.
"""

from __future__ import annotations

import contextlib
import functools
import json
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests import models

FOLDER = pathlib.Path(__file__).parent.parent / "data"
PRECISIONS = ("fp32", "bf16", "fp16", "all")
"""float32, autocast to two types, all weights in bfloat16."""
STEPS = 3
_BUILD = {name: models.MODELS[name][0] for name in ("resnet50", "vit", "bert", "gpt2", "llama")}
SIZES: dict[
    str, tuple[Callable[[], torch.nn.Module], Callable[[str], tuple[Any, ...]], Callable[..., torch.Tensor]]
] = {
    "unet": (
        lambda: models.UNet(3, 1),
        lambda device: (torch.randn(8, 3, 256, 256, device=device), torch.rand(8, 1, 256, 256, device=device)),
        models._segment,
    ),
    "lenet": (models.LeNet, models._images((256, 1, 28, 28), 10), models._classify),
    "resnet50": (_BUILD["resnet50"], models._images((32, 3, 224, 224), 1000), models._classify),
    "vit": (_BUILD["vit"], models._images((16, 3, 224, 224), 1000), models._classify),
    "bert": (_BUILD["bert"], models._language(30522, 8, 256), models._own_loss),
    "gpt2": (_BUILD["gpt2"], models._language(50257, 4, 512), models._own_loss),
    "llama": (_BUILD["llama"], models._language(32000, 4, 512), models._own_loss),
    "lstm": (models.LSTMTagger, models._language(1000, 16, 200), models._tag),
}
"""Name -> constructor, function that makes a batch, function of model and batch that returns the loss."""


def train(kind: str, precision: str) -> None:
    """Train a model for three steps on `cuda`."""
    build, make, loss_of = SIZES[kind]
    model = build().cuda()
    if precision == "all":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    # With the default scale the first gradients overflow: the update is skipped, and there is no optimizer state.
    scaler = torch.amp.GradScaler("cuda", init_scale=1.0) if precision == "fp16" else None
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(precision)
    for _ in range(STEPS):
        batch = make("cuda")
        if precision == "all":
            batch = tuple(tensor.bfloat16() if tensor.is_floating_point() else tensor for tensor in batch)
        with torch.autocast("cuda", dtype) if dtype is not None else contextlib.nullcontext():
            loss = loss_of(model, batch)
        if scaler is not None:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()


def llama7b() -> None:
    """Train Llama 7B in bfloat16 with checkpoints, one sequence of 1024 tokens, for two steps."""
    import transformers

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(use_cache=False))
    finally:
        torch.set_default_dtype(default)
    model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        tokens = torch.randint(32000, (1, 1024), device="cuda")
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


ZOO: dict[str, Callable[[], None]] = {
    f"{kind} {precision}": functools.partial(train, kind, precision) for kind in SIZES for precision in PRECISIONS
}
ZOO["llama7b all, checkpointed"] = llama7b


def measure(name: str) -> dict[str, int]:
    """Train a model on the real GPU in this process and return its peaks in bytes."""
    torch.manual_seed(0)
    ZOO[name]()
    torch.cuda.synchronize()
    return {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}


def predicted(name: str, gpu: str, release: str) -> dict[str, int]:
    """Return the peaks of a model on a virtual GPU in bytes."""
    import memexplore as mx

    tape = mx.simulate(ZOO[name], gpu=gpu, release=release)
    return {curve: mx.peak(tape, curve)[0] for curve in ("allocated", "reserved")}


def measured_files() -> list[pathlib.Path]:
    """Return the files of measured peaks."""
    return sorted(FOLDER.glob("zoo_*.json"))


def _measure_all(names: list[str]) -> None:
    gpu, release = torch.cuda.get_device_name(), torch.__version__.partition("+")[0]
    path = FOLDER / f"zoo_{'_'.join(gpu.lower().split())}_torch_{release}.json"
    found = json.loads(path.read_text()) if path.exists() else {"gpu": gpu, "torch": release, "peaks": {}}
    for name in names:
        done = subprocess.run([sys.executable, "-m", "tests.gpu.zoo", "--child", name], capture_output=True, text=True)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        found["peaks"][name] = json.loads(done.stdout.strip().splitlines()[-1])
    path.write_text(json.dumps(found, indent=1) + "\n")


def main() -> None:
    """Measure where there is a GPU, and print the measured peaks beside the predicted ones."""
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(measure(sys.argv[2])))
        return
    names = sys.argv[1:] or list(ZOO)
    if torch.cuda.is_available():
        _measure_all(names)
    print("| model | measured | memexplore | reserved | memexplore |\n|---|---|---|---|---|")
    for path in measured_files():
        run = json.loads(path.read_text())
        for name in filter(run["peaks"].__contains__, names):
            measured, found = run["peaks"][name], predicted(name, run["gpu"], run["torch"])
            cells = [
                f"{measured[curve] / 2**20:,.1f} MiB | {_difference(found[curve], measured[curve])}"
                for curve in ("allocated", "reserved")
            ]
            print(f"| {name} | {' | '.join(cells)} |", flush=True)


def _difference(found: int, measured: int) -> str:
    share = (found / measured - 1) * 100
    return (
        "0"
        if found == measured
        else f"{found - measured:+,} B ({f'{share:+.2f} %' if abs(share) >= 0.01 else '< 0.01 %'})"
    )


if __name__ == "__main__":
    main()
