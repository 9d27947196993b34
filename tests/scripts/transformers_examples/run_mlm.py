"""Masked language modelling with DataCollatorForLanguageModeling and fp16, as run_mlm.py."""

import math

import torch
from _local import rng, sentence, tokenizer, write_json
from datasets import load_dataset
from transformers import (
    AutoModelForMaskedLM,
    BertConfig,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(1)
random = rng(1)
write_json("train.json", [{"text": sentence(random)} for _ in range(40)])
write_json("valid.json", [{"text": sentence(random)} for _ in range(11)])
raw = load_dataset("json", data_files={"train": "train.json", "validation": "valid.json"})
tok = tokenizer()
config = BertConfig(
    vocab_size=len(tok),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    max_position_embeddings=128,
)
model = AutoModelForMaskedLM.from_config(config)
encoded = raw.map(
    lambda e: tok(e["text"], truncation=True, max_length=32, return_special_tokens_mask=True),
    batched=True,
    remove_columns=["text"],
)
collator = DataCollatorForLanguageModeling(tokenizer=tok, mlm_probability=0.15)
args = TrainingArguments(
    output_dir="mlm",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    per_device_eval_batch_size=4,
    fp16=torch.cuda.is_available(),
    eval_strategy="epoch",
    save_strategy="epoch",
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
)


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    mask = labels.reshape(-1) != -100
    return {"accuracy": float((preds.reshape(-1)[mask] == labels.reshape(-1)[mask]).mean()), "shape": list(preds.shape)}


trainer = Trainer(
    model=model,
    args=args,
    train_dataset=encoded["train"],
    eval_dataset=encoded["validation"],
    data_collator=collator,
    processing_class=tok,
    compute_metrics=compute_metrics,
    preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(dim=-1),
)
trainer.train()
metrics = trainer.evaluate()
print(
    "steps",
    trainer.state.global_step,
    "predictions of",
    metrics["eval_shape"][0],
    "sentences",
    f"perplexity {math.exp(metrics['eval_loss']):.2f}",
)
