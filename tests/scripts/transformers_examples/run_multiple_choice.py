"""Multiple choice with a collator that flattens the choices, as run_swag.py."""

import numpy as np
from _local import rng, sentence, tokenizer
from transformers import (
    BertConfig,
    BertForMultipleChoice,
    DataCollatorForMultipleChoice,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(10)
random = rng(10)
tok = tokenizer()


def row():
    context = sentence(random, 4, 8)
    out = tok([context] * 4, [sentence(random, 3, 8) for _ in range(4)])
    return {**{k: v for k, v in out.items() if k != "token_type_ids"}, "labels": random.randrange(4)}


train, valid = [row() for _ in range(16)], [row() for _ in range(7)]
config = BertConfig(
    vocab_size=len(tok), hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=128
)
model = BertForMultipleChoice(config)
args = TrainingArguments(
    "swag",
    num_train_epochs=1,
    per_device_train_batch_size=4,
    per_device_eval_batch_size=4,
    report_to="none",
    save_strategy="no",
    eval_strategy="epoch",
    disable_tqdm=True,
    remove_unused_columns=False,
    logging_steps=2,
)
trainer = Trainer(
    model=model,
    args=args,
    train_dataset=train,
    eval_dataset=valid,
    processing_class=tok,
    data_collator=DataCollatorForMultipleChoice(tok),
    compute_metrics=lambda p: {
        "accuracy": float((np.argmax(p.predictions, 1) == p.label_ids).mean()),
        "shape": list(p.predictions.shape),
    },
)
trainer.train()
print(trainer.evaluate()["eval_shape"])
