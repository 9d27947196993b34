"""Whisper fine-tuning with Seq2SeqTrainer on generated log-mel features; tiny config."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import (
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    WhisperConfig,
    WhisperForConditionalGeneration,
    set_seed,
)

set_seed(0)
rng = np.random.default_rng(1)
config = WhisperConfig(
    vocab_size=80,
    num_mel_bins=16,
    encoder_layers=2,
    decoder_layers=2,
    d_model=48,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=96,
    max_source_positions=50,
    max_target_positions=32,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
    decoder_start_token_id=1,
    suppress_tokens=None,
    begin_suppress_tokens=None,
)
model = WhisperForConditionalGeneration(config)
model.generation_config.suppress_tokens = None
model.generation_config.begin_suppress_tokens = None
rows = [
    {
        "input_features": rng.standard_normal((16, 100)).astype(np.float32),
        "labels": [1, *rng.integers(3, 80, rng.integers(4, 10)).tolist(), 2],
    }
    for _ in range(12)
]


@dataclass
class Collator:
    def __call__(self, features):
        longest = max(len(f["labels"]) for f in features)
        labels = torch.tensor([f["labels"] + [-100] * (longest - len(f["labels"])) for f in features])
        if (labels[:, 0] == 1).all().item():
            labels = labels[:, 1:]
        return {"input_features": torch.tensor(np.stack([f["input_features"] for f in features])), "labels": labels}


args = Seq2SeqTrainingArguments(
    "whisper",
    max_steps=3,
    per_device_train_batch_size=4,
    report_to="none",
    save_strategy="no",
    disable_tqdm=True,
    logging_steps=1,
    gradient_checkpointing=True,
    fp16=torch.cuda.is_available(),
    warmup_steps=1,
    learning_rate=1e-5,
    remove_unused_columns=False,
)
trainer = Seq2SeqTrainer(model=model, args=args, train_dataset=rows, data_collator=Collator())
trainer.train()
metrics = trainer.evaluate(rows[:4])
print("steps", trainer.state.global_step, f"loss {metrics['eval_loss']:.3f}")
