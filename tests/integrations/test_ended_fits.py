"""The end of watched fits: exceptions, interrupts, several fits; nothing stays changed and nothing alive."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import accelerate
import pytest
import pytorch_lightning
import torch
import transformers

import memexplore as mx
from memexplore.integrations import LightningCallback, TransformersCallback, watch_accelerator
from memexplore.live import watch as watch_module
from memexplore.live.live import State
from memexplore.tape import Ending
from tests.integrations.trainers import BATCH, Module, Samples, arguments, lightning, loader, net, sgd


def hooks():
    return [dict(table) for table in (watch_module.OPTIMIZER_PRE_HOOKS, watch_module.OPTIMIZER_POST_HOOKS)]


def make(tmp_path, callback, steps=6, failing=None, model=None, kind=transformers.Trainer, **options):
    model = model or net()
    return kind(
        model,
        arguments(tmp_path, use_cpu=True, **options),
        train_dataset=Samples(steps * BATCH, failing),
        optimizers=(sgd(model), None),
        callbacks=[callback],
    )


class Interrupting(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_an_exception_ends_the_training_of_a_trainer(tmp_path):
    callback, before = TransformersCallback(), hooks()
    with pytest.raises(ValueError, match="a damaged sample"):
        make(tmp_path, callback, failing=3).train()
    live = callback.live
    assert live.state is State.FAILED
    assert "ValueError: a damaged sample" in live.error
    assert live.tape().meta.ending is Ending.ERROR
    assert hooks() == before


def test_an_interrupt_ends_the_training_of_a_trainer(tmp_path):
    callback, before = TransformersCallback(), hooks()
    trainer = make(tmp_path, callback)
    trainer.add_callback(Interrupting())
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert callback.live.state is State.FAILED
    assert callback.live.steps()["step"].tolist()[:3] == [1, 2, 3]
    assert hooks() == before


class OwnLoop(transformers.Trainer):
    """A trainer with a loop of its own, as those of reinforcement learning."""

    def train(self):
        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        raise RuntimeError("the reward model is gone")


def test_a_trainer_with_a_loop_of_its_own_is_ended_too(tmp_path):
    callback = TransformersCallback()
    with pytest.raises(RuntimeError, match="the reward model is gone"):
        make(tmp_path, callback, kind=OwnLoop).train()
    assert callback.live.state is State.FAILED
    assert "the reward model is gone" in callback.live.error


class TooLarge(transformers.Trainer):
    def training_step(self, model, inputs, *args, **kwargs):
        if len(inputs["labels"]) > BATCH // 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(model, inputs, *args, **kwargs)


def test_a_batch_size_that_is_tried_again_begins_a_new_run(tmp_path):
    lives = []

    class Keeping(TransformersCallback):
        def on_train_begin(self, *args, **kwargs):
            super().on_train_begin(*args, **kwargs)
            lives.append(self.live)

    make(tmp_path, Keeping(), kind=TooLarge, auto_find_batch_size=True).train()
    assert [live.state for live in lives] == [State.FAILED] * (len(lives) - 1) + [State.ENDED]
    assert len(lives) > 1
    assert all("OutOfMemoryError" in live.error for live in lives[:-1])


def test_an_exception_of_lightning_ends_the_fit():
    def fail(batch):
        if batch == 2:
            raise ValueError("a damaged batch")

    callback, before = LightningCallback(), hooks()
    with pytest.raises(ValueError, match="a damaged batch"):
        lightning(callback, accelerator="cpu").fit(Module(fail), loader(5))
    assert callback.live.state is State.FAILED
    assert "ValueError: a damaged batch" in callback.live.error
    assert hooks() == before


def test_an_interrupt_of_lightning_ends_the_fit():
    def interrupt(batch):
        if batch == 2:
            raise KeyboardInterrupt

    callback, before = LightningCallback(), hooks()
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        lightning(callback, accelerator="cpu").fit(Module(interrupt), loader(5))
    assert callback.live.state is State.FAILED
    assert callback.live.error.startswith("KeyboardInterrupt")
    assert hooks() == before


class FailsAtTheEnd(pytorch_lightning.Callback):
    def on_exception(self, trainer, pl_module, exception):
        raise RuntimeError("another callback failed")

    def on_fit_end(self, trainer, pl_module):
        raise RuntimeError("another callback failed")


def test_a_callback_that_fails_before_ours_does_not_keep_the_fit_open():
    callback, before = LightningCallback(), hooks()
    trainer = lightning(callback, accelerator="cpu")
    trainer.callbacks.insert(0, FailsAtTheEnd())
    with pytest.raises(RuntimeError, match="another callback failed"):
        trainer.fit(Module(), loader(3))
    assert callback.live.state is State.FAILED
    assert hooks() == before


def test_an_exception_in_an_accelerate_loop_ends_the_block():
    accelerator = accelerate.Accelerator(cpu=True)
    model = net()
    accelerator.prepare(model, sgd(model))
    with pytest.raises(ValueError, match="stop"), watch_accelerator(accelerator) as live:
        raise ValueError("stop")
    assert live.state is State.FAILED


def test_an_accelerator_without_a_model_is_one_sentence():
    with pytest.raises(RuntimeError, match=r"call `accelerator.prepare\(model, optimizer\)` before"):
        watch_accelerator(accelerate.Accelerator(cpu=True))


def test_two_fits_in_a_row_are_two_runs_in_two_folders(tmp_path):
    folder = tmp_path / "run"
    callback = TransformersCallback(folder=folder)
    trainer = make(tmp_path / "out", callback, steps=3)
    trainer.train()
    first = callback.live
    trainer.train()
    assert callback.live is not first
    assert [len(live.steps()) for live in (first, callback.live)] == [3, 3]
    assert [mx.load(path).table()["steps"].tolist() for path in (folder, tmp_path / "run-2")] == [[3], [3]]


def test_a_resumed_training_is_watched(tmp_path):
    make(tmp_path, TransformersCallback(), save_strategy="steps", save_steps=4).train()
    callback = TransformersCallback()
    make(tmp_path, callback).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    # Two of six steps are left.
    assert callback.live.steps()["step"].tolist() == [1, 2]


def test_a_resumed_fit_is_watched(tmp_path):
    path = tmp_path / "half.ckpt"
    trainer = lightning(LightningCallback(), accelerator="cpu", max_steps=4)
    trainer.fit(Module(), loader(6))
    trainer.save_checkpoint(path)
    callback = LightningCallback()
    lightning(callback, accelerator="cpu", max_epochs=2, max_steps=6).fit(Module(), loader(6), ckpt_path=path)
    assert callback.live.steps()["step"].tolist() == [1, 2]


@pytest.mark.parametrize("kind", ["trainer", "lightning", "accelerate"])
def test_no_model_is_kept_alive(kind, tmp_path):
    if kind == "trainer":
        callback = TransformersCallback()
        trainer = make(tmp_path, callback, steps=2)
        trainer.train()
        model, live = weakref.ref(trainer.model), callback.live
        del trainer
    elif kind == "lightning":
        callback, module = LightningCallback(), Module()
        lightning(callback, accelerator="cpu").fit(module, loader(2))
        model, live = weakref.ref(module), callback.live
        # Lightning gives every callback the method `log` of the model.
        del module, callback
    else:
        accelerator, module = accelerate.Accelerator(cpu=True), net()
        module, _ = accelerator.prepare(module, sgd(module))
        with watch_accelerator(accelerator) as live:
            pass
        model = weakref.ref(module)
        accelerator.free_memory()
        del accelerator, module
    accelerate.state.AcceleratorState._reset_state()
    gc.collect()
    assert model() is None
    assert live.state is State.ENDED


def test_methods_of_the_trainers_are_restored_with_the_last_callback(tmp_path):
    gc.collect()
    classes = (transformers.Trainer, OwnLoop, pytorch_lightning.Trainer)
    names = ("train", "_inner_training_loop", "fit")
    before = [vars(kind).get(name) for kind in classes for name in names]
    first, second = TransformersCallback(), LightningCallback()
    assert transformers.Trainer.train is not before[0]
    del first
    assert pytorch_lightning.Trainer.fit is not before[-1]
    del second
    gc.collect()
    assert [vars(kind).get(name) for kind in classes for name in names] == before


@pytest.mark.parametrize("kind", [TransformersCallback, LightningCallback])
def test_copies_of_a_callback_watch_fits_of_their_own(kind):
    callback = kind(first=7, folder="run")
    for each in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert type(each) is kind
        assert each._options == callback._options
        with pytest.raises(RuntimeError, match="no fit has begun yet"):
            each.live  # noqa: B018


OTHER_NAME = """
import sys
{first}
from memexplore.integrations import LightningCallback
import {package} as pl
import torch
class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
callback = LightningCallback()
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(16, 8)), batch_size=4)
pl.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False, enable_checkpointing=False,
           enable_progress_bar=False).fit(Module(), data)
assert isinstance(callback, pl.Callback) or not {same}
print(callback.live.steps()["step"].tolist(), callback.live.state)
"""


@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_both_names_of_lightning_work_in_any_order_of_imports(package, order):
    pytest.importorskip(package)
    first = f"import {package}" if order == "before" else ""
    code = OTHER_NAME.format(package=package, first=first, same=order == "before")
    assert python(code) == "[1, 2, 3, 4] ended"


def test_the_libraries_are_imported_when_they_are_used():
    code = "import sys, memexplore.integrations as i; names = {'transformers', 'lightning', 'pytorch_lightning'}"
    assert python(f"{code}; print(sorted((names | {{'accelerate', 'torch'}}) & set(sys.modules)))") == "[]"


@pytest.mark.parametrize(
    ("name", "modules", "sentence"),
    [
        ("TransformersCallback", ["transformers"], "transformers is not installed: pip install transformers"),
        (
            "LightningCallback",
            ["lightning", "lightning.pytorch", "pytorch_lightning"],
            "Lightning is not installed: pip install lightning",
        ),
        ("watch_accelerator", ["accelerate"], "accelerate is not installed: pip install accelerate"),
    ],
)
def test_a_library_that_is_missing_is_one_sentence(name, modules, sentence):
    code = f"""
import sys, torch
for module in {modules!r}:
    sys.modules[module] = None
try:
    from memexplore.integrations import {name}
except ImportError as error:
    print(error)
"""
    assert python(code) == sentence


def python(code):
    root = str(Path(mx.__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]
