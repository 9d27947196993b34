"""Sentence pair classification from a CSV file with Trainer, as run_glue.py: dynamic padding, metrics, prediction file."""

import csv
import os

import numpy as np
from _local import rng, sentence, tokenizer
from datasets import load_dataset
from sklearn.metrics import accuracy_score, f1_score
from transformers import (
    AutoModelForSequenceClassification,
    DataCollatorWithPadding,
    DistilBertConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(42)
random = rng(2)
for name, n in (("train.csv", 60), ("dev.csv", 25), ("test.csv", 13)):
    with open(name, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["sentence1", "sentence2", "label"])
        writer.writerows([sentence(random), sentence(random), random.randint(0, 2)] for _ in range(n))
raw = load_dataset("csv", data_files={"train": "train.csv", "validation": "dev.csv", "test": "test.csv"})
label_list = sorted(raw["train"].unique("label"))
tok = tokenizer()
config = DistilBertConfig(
    vocab_size=len(tok),
    dim=64,
    hidden_dim=128,
    n_layers=2,
    n_heads=4,
    max_position_embeddings=128,
    num_labels=len(label_list),
)
model = AutoModelForSequenceClassification.from_config(config)
encoded = raw.map(lambda e: tok(e["sentence1"], e["sentence2"], truncation=True, max_length=64), batched=True)


def compute_metrics(p):
    preds = np.argmax(p.predictions[0] if isinstance(p.predictions, tuple) else p.predictions, axis=1)
    return {
        "accuracy": accuracy_score(p.label_ids, preds),
        "f1": f1_score(p.label_ids, preds, average="macro"),
        "labels": np.bincount(p.label_ids).tolist(),
    }


args = TrainingArguments(
    "glue",
    num_train_epochs=2,
    per_device_train_batch_size=8,
    eval_strategy="epoch",
    save_strategy="epoch",
    report_to="none",
    load_best_model_at_end=True,
    metric_for_best_model="accuracy",
    disable_tqdm=True,
    logging_steps=4,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=encoded["train"],
    eval_dataset=encoded["validation"],
    compute_metrics=compute_metrics,
    processing_class=tok,
    data_collator=DataCollatorWithPadding(tok),
)
trainer.train()
metrics = trainer.evaluate(eval_dataset=encoded["validation"])
print(f"accuracy {metrics['eval_accuracy']:.4f} f1 {metrics['eval_f1']:.4f} labels {metrics['eval_labels']}")
trainer.save_state()
predictions = trainer.predict(encoded["test"].remove_columns("label"), metric_key_prefix="predict").predictions
print("predictions", predictions.shape)
predictions = np.argmax(predictions, axis=1)
with open("predict_results.txt", "w") as writer:
    writer.write("index\tprediction\n")
    for index, item in enumerate(predictions):
        writer.write(f"{index}\t{label_list[item]}\n")
print(sum(1 for _ in open("predict_results.txt")), "lines", os.path.exists("glue/trainer_state.json"))
