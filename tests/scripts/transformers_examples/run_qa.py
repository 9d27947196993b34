"""Extractive question answering with Trainer, as run_qa.py: start and end positions, post-processing of predictions on the CPU."""

import numpy as np
from _local import rng, sentence, tokenizer, write_json
from datasets import load_dataset
from transformers import (
    AutoModelForQuestionAnswering,
    BertConfig,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

set_seed(0)
random = rng(4)


def row():
    context = sentence(random, 12, 20)
    words = context.split()
    start = random.randrange(len(words) - 2)
    answer = " ".join(words[start : start + 2])
    return {"question": sentence(random, 3, 5), "context": context, "answer": answer, "start": context.index(answer)}


write_json("train.json", [row() for _ in range(32)])
write_json("valid.json", [row() for _ in range(12)])
raw = load_dataset("json", data_files={"train": "train.json", "validation": "valid.json"})
tok = tokenizer()


def prepare(examples):
    out = tok(
        examples["question"],
        examples["context"],
        truncation="only_second",
        max_length=40,
        padding="max_length",
        return_offsets_mapping=True,
    )
    starts, ends = [], []
    for i, offsets in enumerate(out["offset_mapping"]):
        sequence_ids = out.sequence_ids(i)
        begin, end = examples["start"][i], examples["start"][i] + len(examples["answer"][i])
        inside = [k for k, (a, b) in enumerate(offsets) if sequence_ids[k] == 1 and a >= begin and b <= end]
        starts.append(inside[0] if inside else 0)
        ends.append(inside[-1] if inside else 0)
    out["start_positions"], out["end_positions"] = starts, ends
    return out


encoded = raw.map(prepare, batched=True, remove_columns=raw["train"].column_names)
config = BertConfig(
    vocab_size=len(tok), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
)
model = AutoModelForQuestionAnswering.from_config(config)
args = TrainingArguments(
    "qa",
    num_train_epochs=1,
    per_device_train_batch_size=8,
    report_to="none",
    disable_tqdm=True,
    logging_steps=2,
    save_strategy="no",
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=encoded["train"].remove_columns("offset_mapping"),
    data_collator=default_data_collator,
    processing_class=tok,
)
trainer.train()
result = trainer.predict(encoded["validation"].remove_columns("offset_mapping"))
start_logits, end_logits = result.predictions
answers = {}
for i, offsets in enumerate(encoded["validation"]["offset_mapping"]):
    best = (-1e9, "")
    for start in np.argsort(start_logits[i])[-1:-6:-1].tolist():
        for end in np.argsort(end_logits[i])[-1:-6:-1].tolist():
            if end >= start and end - start <= 10:
                score = start_logits[i][start] + end_logits[i][end]
                if score > best[0]:
                    best = (score, raw["validation"][i]["context"][offsets[start][0] : offsets[end][1]])
    answers[i] = best[1]
print(start_logits.shape, end_logits.shape, len(answers), "answers")
