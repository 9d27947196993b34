"""Checkpoints of libraries on a virtual GPU: written, rotated and loaded again, with the user's unchanged on disk."""

from __future__ import annotations

import contextlib
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

import memexplore as mx
from memexplore.virtual_gpu.files import session

pytestmark = [
    pytest.mark.filterwarnings("ignore:memexplore.*temporary folder"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


@contextlib.contextmanager
def _notebook() -> Iterator[None]:
    with mx.virtual("T4"):
        yield


@contextlib.contextmanager
def _script() -> Iterator[None]:
    with session.every_file(), mx.virtual("T4"):
        yield


@pytest.fixture(params=[_notebook, _script])
def virtual(request: Any) -> Callable[[], contextlib.AbstractContextManager[None]]:
    return request.param


def _contents(folder: pathlib.Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _gpt2() -> Any:
    config = transformers.GPT2Config(
        n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=16, bos_token_id=0, eos_token_id=1
    )
    return transformers.GPT2LMHeadModel(config)


def test_a_saved_transformers_model_is_loaded_onto_the_device(tmp_path, monkeypatch, virtual):
    monkeypatch.chdir(tmp_path)
    _gpt2().save_pretrained("model")
    before = _contents(tmp_path)
    with virtual():
        real = transformers.GPT2LMHeadModel.from_pretrained("model").cuda()
        assert real.transformer.wte.weight.is_cuda
        real.save_pretrained("model")
        real.save_pretrained("new")
        assert sorted(os.listdir("new")) == ["config.json", "generation_config.json", "model.safetensors"]
        loaded = transformers.GPT2LMHeadModel.from_pretrained("new").cuda()
        assert loaded.transformer.wte.weight.shape == (32, 16)
    assert _contents(tmp_path) == before


def test_a_configuration_saved_in_a_notebook_is_written_in_place(tmp_path):
    with mx.virtual("T4"):
        _gpt2().config.save_pretrained(tmp_path / "config")
    assert os.listdir(tmp_path / "config") == ["config.json"]


def test_a_tokenizer_is_saved_with_its_model_and_the_real_one_stays(tmp_path, monkeypatch, virtual):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)

    def tokenizer(*words: str) -> Any:
        model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=words[0])
        return tokenizers.Tokenizer(model)

    os.mkdir("model")
    tokenizer("?", "old").save("model/tokenizer.json")
    before = _contents(tmp_path)
    with virtual():
        tokenizer("?", "new").save("new.json")
        assert tokenizers.Tokenizer.from_file("new.json").token_to_id("new") == 1
        model = _gpt2()
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer("?", "more", "new"))
        monkeypatch.setattr(model, "save_pretrained", _saving_both(model.save_pretrained, fast))
        model.save_pretrained("both")
        assert "tokenizer.json" in os.listdir("both")
        assert transformers.PreTrainedTokenizerFast.from_pretrained("both").convert_tokens_to_ids("new") == 2
    assert {name: found for name, found in _contents(tmp_path).items() if name in before} == before
    # In a notebook too: a tokenizer has no tensors.
    assert os.path.exists("new.json")


def _saving_both(save: Callable[[str], None], tokenizer: Any) -> Callable[[str], None]:
    def save_both(folder: str) -> None:
        save(folder)
        tokenizer.save_pretrained(folder)

    return save_both


def test_a_real_tokenizer_is_not_replaced_by_a_run(tmp_path, monkeypatch):
    tokenizers = pytest.importorskip("tokenizers")
    monkeypatch.chdir(tmp_path)
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"old": 0}, unk_token="old")).save("tokenizer.json")
    before = _contents(tmp_path)
    with _script():
        model = tokenizers.models.WordLevel({"new": 0}, unk_token="new")
        tokenizers.Tokenizer(model).save("tokenizer.json")
        assert tokenizers.Tokenizer.from_file("tokenizer.json").id_to_token(0) == "new"
        assert model.save(".") == ["./vocab.json"]
    assert {name: found for name, found in _contents(tmp_path).items() if name in before} == before
    assert pathlib.Path("vocab.json").read_text() == '{"new":0}'


class _Counter(transformers.TrainerCallback):
    """Counts the steps of one call of `train`."""

    steps = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.steps += 1


def _train(folder: str, steps: int, resume: bool) -> int:
    data = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        folder, max_steps=steps, save_steps=1, save_total_limit=1, per_device_train_batch_size=2, report_to=[],
        disable_tqdm=True, logging_steps=1,
    )  # fmt: skip
    counter = _Counter()
    trainer = transformers.Trainer(_gpt2(), arguments, train_dataset=data, callbacks=[counter])
    trainer.train(resume_from_checkpoint=resume)
    return counter.steps


def test_a_trainer_rotates_and_resumes_its_own_checkpoints_only(tmp_path, monkeypatch, virtual):
    pytest.importorskip("accelerate")
    _forget_device()
    monkeypatch.chdir(tmp_path)
    real = pathlib.Path("out/checkpoint-2")
    real.mkdir(parents=True)
    torch.save({"w": torch.arange(3.0)}, real / "optimizer.pt")
    (real / "trainer_state.json").write_text('{"global_step": 2}')
    before = _contents(tmp_path)
    with virtual():
        assert _train("out", 2, resume=False) == 2
        assert os.listdir("out") == ["checkpoint-2"]
        # Step 2 is done, and steps 3 and 4 are left.
        assert _train("out", 4, resume=True) == 2
        assert os.listdir("out") == ["checkpoint-4"]
    _forget_device()
    assert _contents(tmp_path) == before


def _forget_device() -> None:
    """Let accelerate look for a device again, which it does once in a process."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)


def _prepared(accelerator: Any) -> Any:
    model = torch.nn.Linear(4, 4)
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters()))


def test_accelerate_saves_and_loads_its_state(tmp_path, monkeypatch, virtual):
    accelerate = pytest.importorskip("accelerate")
    _forget_device()
    monkeypatch.chdir(tmp_path)
    accelerator = accelerate.Accelerator(cpu=True)
    _prepared(accelerator)
    accelerator.save_state("state")
    before = _contents(tmp_path)
    _forget_device()
    with virtual():
        accelerator = accelerate.Accelerator()
        model, optimizer = _prepared(accelerator)
        accelerator.backward(model(torch.ones(2, 4, device="cuda")).sum())
        optimizer.step()
        accelerator.save_state("state")
        accelerator.load_state("state")
        accelerator.save_model(model, "model")
        assert os.listdir("model") == ["model.safetensors"]
        assert model.weight.is_cuda
    _forget_device()
    assert _contents(tmp_path) == before


def test_lightning_rotates_and_loads_its_own_checkpoints_only(tmp_path, monkeypatch, virtual):
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.layer(batch[0]).sum()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    def fit(accelerator: str) -> str:
        callback = lightning.pytorch.callbacks.ModelCheckpoint(
            "out", monitor="loss", save_last=True, filename="{epoch}", enable_version_counter=False
        )
        trainer = lightning.Trainer(
            max_epochs=2, callbacks=[callback], accelerator=accelerator, enable_progress_bar=False,
            enable_model_summary=False, log_every_n_steps=1,
            logger=lightning.pytorch.loggers.CSVLogger("out", "csv", version=0),
        )  # fmt: skip
        data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(8, 8)), 4)
        trainer.fit(Module(), data)
        return callback.last_model_path

    monkeypatch.chdir(tmp_path)
    fit("cpu")
    before = _contents(tmp_path)
    assert before
    with virtual():
        path = fit("gpu")
        assert Module.load_from_checkpoint(path, map_location="cuda").layer.weight.is_cuda
    assert _contents(tmp_path) == before
