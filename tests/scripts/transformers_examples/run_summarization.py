"""Summarisation with Seq2SeqTrainer and predict_with_generate, as run_summarization.py; tiny T5."""

import numpy as np
from _local import rng, sentence, tokenizer, write_json
from datasets import load_dataset
from transformers import (
    DataCollatorForSeq2Seq,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    T5ForConditionalGeneration,
    set_seed,
)

set_seed(5)
random = rng(5)
for name, n in (("train.json", 24), ("valid.json", 10)):
    write_json(name, [{"document": sentence(random, 10, 24), "summary": sentence(random, 3, 6)} for _ in range(n)])
raw = load_dataset("json", data_files={"train": "train.json", "validation": "valid.json"})
tok = tokenizer()
config = T5Config(
    vocab_size=len(tok),
    d_model=64,
    d_kv=16,
    d_ff=128,
    num_layers=2,
    num_heads=4,
    pad_token_id=0,
    eos_token_id=3,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config)


def preprocess(examples):
    inputs = tok(["the " + d for d in examples["document"]], max_length=32, truncation=True)
    inputs["labels"] = tok(text_target=examples["summary"], max_length=12, truncation=True)["input_ids"]
    inputs.pop("token_type_ids", None)
    return inputs


encoded = raw.map(preprocess, batched=True, remove_columns=raw["train"].column_names)


def compute_metrics(eval_preds):
    preds, labels = eval_preds
    preds = np.where(preds != -100, preds, tok.pad_token_id)
    decoded_preds = tok.batch_decode(preds, skip_special_tokens=True)
    labels = np.where(labels != -100, labels, tok.pad_token_id)
    decoded_labels = tok.batch_decode(labels, skip_special_tokens=True)
    overlap = np.mean(
        [
            len(set(p.split()) & set(r.split())) / max(1, len(set(r.split())))
            for p, r in zip(decoded_preds, decoded_labels)
        ]
    )
    return {"overlap": float(overlap), "references": sum(len(r.split()) for r in decoded_labels)}


args = Seq2SeqTrainingArguments(
    "sum",
    num_train_epochs=1,
    per_device_train_batch_size=6,
    per_device_eval_batch_size=4,
    predict_with_generate=True,
    generation_max_length=14,
    report_to="none",
    disable_tqdm=True,
    save_strategy="no",
    logging_steps=2,
)
trainer = Seq2SeqTrainer(
    model=model,
    args=args,
    train_dataset=encoded["train"],
    eval_dataset=encoded["validation"],
    processing_class=tok,
    data_collator=DataCollatorForSeq2Seq(tok, model=model, label_pad_token_id=-100, pad_to_multiple_of=8),
    compute_metrics=compute_metrics,
)
trainer.train()
metrics = trainer.evaluate(max_length=14, num_beams=2)
print(f"overlap {metrics['eval_overlap']:.4f}, words in references {metrics['eval_references']}")
