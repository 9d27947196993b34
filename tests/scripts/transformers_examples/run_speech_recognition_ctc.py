"""Speech recognition with Wav2Vec2 and CTC in Trainer, as run_speech_recognition_ctc.py; generated audio, tiny model."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import Trainer, TrainingArguments, Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC, set_seed

set_seed(8)
rng = np.random.default_rng(8)
extractor = Wav2Vec2FeatureExtractor(
    feature_size=1, sampling_rate=16000, padding_value=0.0, do_normalize=True, return_attention_mask=True
)
rows = [
    {
        "input_values": rng.standard_normal(rng.integers(4000, 7000)).astype(np.float32),
        "labels": rng.integers(1, 20, rng.integers(3, 6)).tolist(),
    }
    for _ in range(16)
]


@dataclass
class DataCollatorCTCWithPadding:
    extractor: Wav2Vec2FeatureExtractor

    def __call__(self, features):
        batch = self.extractor(
            [f["input_values"] for f in features], sampling_rate=16000, padding=True, return_tensors="pt"
        )
        longest = max(len(f["labels"]) for f in features)
        batch["labels"] = torch.tensor([f["labels"] + [-100] * (longest - len(f["labels"])) for f in features])
        return batch


config = Wav2Vec2Config(
    vocab_size=20,
    hidden_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=96,
    conv_dim=(24, 24, 24),
    conv_stride=(5, 4, 4),
    conv_kernel=(10, 8, 4),
    num_conv_pos_embeddings=16,
    num_conv_pos_embedding_groups=4,
    ctc_loss_reduction="mean",
    pad_token_id=0,
    ctc_zero_infinity=True,
    mask_time_length=2,
)
model = Wav2Vec2ForCTC(config)
model.freeze_feature_encoder()


def compute_metrics(pred):
    pred_ids = np.argmax(pred.predictions, axis=-1)
    label_ids = pred.label_ids.copy()
    label_ids[label_ids == -100] = 0
    return {"frames": int(pred_ids.shape[1]), "labels": int((label_ids != 0).sum())}


args = TrainingArguments(
    "ctc",
    num_train_epochs=1,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    report_to="none",
    save_strategy="no",
    eval_strategy="epoch",
    disable_tqdm=True,
    logging_steps=1,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=rows[:12],
    eval_dataset=rows[12:],
    data_collator=DataCollatorCTCWithPadding(extractor),
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate()
print("frames", metrics["eval_frames"], "labels", metrics["eval_labels"], f"loss {metrics['eval_loss']:.3f}")
