"""Named entity recognition with Trainer and label alignment, as run_ner.py."""

import numpy as np
from _local import WORDS, rng, tokenizer
from datasets import Dataset
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    RobertaConfig,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(9)
random = rng(9)
label_list = ["O", "B-ANIMAL", "B-THING"]
kinds = {"cat": 1, "dog": 1, "bird": 1, "house": 2, "tree": 2, "car": 2, "book": 2}


def rows(n):
    found = {"tokens": [], "ner_tags": []}
    for _ in range(n):
        words = random.choices(WORDS, k=random.randint(5, 15))
        found["tokens"].append(words)
        found["ner_tags"].append([kinds.get(word, 0) for word in words])
    return Dataset.from_dict(found)


tok = tokenizer()


def align(examples):
    out = tok(examples["tokens"], is_split_into_words=True, truncation=True)
    out["labels"] = [
        [-100 if w is None else tags[w] for w in out.word_ids(i)] for i, tags in enumerate(examples["ner_tags"])
    ]
    return out


train, valid = (rows(n).map(align, batched=True, remove_columns=["tokens", "ner_tags"]) for n in (30, 10))
config = RobertaConfig(
    vocab_size=len(tok),
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=128,
    num_labels=3,
    pad_token_id=0,
)
model = AutoModelForTokenClassification.from_config(config)


def compute_metrics(p):
    predictions, labels = p
    predictions = np.argmax(predictions, axis=2)
    true = [[label_list[lab] for lab in label if lab != -100] for label in labels]
    pred = [
        [label_list[q] for q, lab in zip(prediction, label) if lab != -100]
        for prediction, label in zip(predictions, labels)
    ]
    right = sum(a == b for t, q in zip(true, pred) for a, b in zip(t, q))
    entities = sum(a != "O" for t in true for a in t)
    return {"accuracy": right / sum(map(len, true)), "entities": entities, "words": sum(map(len, true))}


args = TrainingArguments(
    "ner",
    num_train_epochs=2,
    per_device_train_batch_size=6,
    report_to="none",
    eval_strategy="epoch",
    disable_tqdm=True,
    logging_steps=5,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=train,
    eval_dataset=valid,
    data_collator=DataCollatorForTokenClassification(tok),
    compute_metrics=compute_metrics,
    processing_class=tok,
)
trainer.train()
metrics = trainer.evaluate()
print(f"accuracy {metrics['eval_accuracy']:.4f}, {metrics['eval_entities']} entities in {metrics['eval_words']} words")
