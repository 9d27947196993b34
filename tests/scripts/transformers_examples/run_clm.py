"""Causal language modelling with Trainer from a local text file, as run_clm.py: grouping texts, evaluation, perplexity, resume."""

import math
import os
from dataclasses import dataclass, field
from itertools import chain

from _local import rng, sentence, tokenizer
from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class DataArguments:
    block_size: int = field(default=32)


def main():
    random = rng()
    for name, lines in (("train.txt", 120), ("valid.txt", 30)):
        with open(name, "w") as file:
            file.writelines(sentence(random) + "\n" for _ in range(lines))
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses(
        args=[
            "--output_dir",
            "out",
            "--max_steps",
            "6",
            "--per_device_train_batch_size",
            "4",
            "--logging_steps",
            "2",
            "--save_steps",
            "3",
            "--eval_strategy",
            "steps",
            "--eval_steps",
            "3",
            "--report_to",
            "none",
            "--learning_rate",
            "1e-3",
        ]
    )
    set_seed(training_args.seed)
    raw_datasets = load_dataset("text", data_files={"train": "train.txt", "validation": "valid.txt"})
    tok = tokenizer(pairs=False)
    config = GPT2Config(
        vocab_size=len(tok), n_positions=64, n_embd=64, n_layer=2, n_head=4, bos_token_id=2, eos_token_id=3
    )
    model = AutoModelForCausalLM.from_config(config)
    tokenized = raw_datasets.map(lambda e: tok(e["text"]), batched=True, remove_columns=["text"])

    def group_texts(examples):
        concatenated = {k: list(chain(*examples[k])) for k in examples if k != "token_type_ids"}
        total = len(concatenated["input_ids"]) // data_args.block_size * data_args.block_size
        result = {
            k: [t[i : i + data_args.block_size] for i in range(0, total, data_args.block_size)]
            for k, t in concatenated.items()
        }
        result["labels"] = result["input_ids"].copy()
        return result

    lm_datasets = tokenized.map(group_texts, batched=True, remove_columns=tokenized["train"].column_names)

    def preprocess_logits_for_metrics(logits, labels):
        return logits.argmax(dim=-1)

    def compute_metrics(eval_preds):
        preds, labels = eval_preds
        return {"accuracy": float((preds[:, :-1] == labels[:, 1:]).mean())}

    trainer = Trainer(
        model=model,
        args=training_args,
        train_dataset=lm_datasets["train"],
        eval_dataset=lm_datasets["validation"],
        processing_class=tok,
        data_collator=default_data_collator,
        compute_metrics=compute_metrics,
        preprocess_logits_for_metrics=preprocess_logits_for_metrics,
    )
    train_result = trainer.train()
    trainer.save_model()
    metrics = train_result.metrics
    print("steps", trainer.state.global_step, "samples", len(lm_datasets["train"]))
    metrics = trainer.evaluate()
    try:
        perplexity = math.exp(metrics["eval_loss"])
    except OverflowError:
        perplexity = float("inf")
    print(f"eval accuracy {metrics['eval_accuracy']:.4f} perplexity {perplexity:.3f}")
    print(sorted(name for name in os.listdir("out") if name.startswith(("checkpoint", "model", "config"))))
    reloaded = AutoModelForCausalLM.from_pretrained("out")
    print("reloaded", sum(p.numel() for p in reloaded.parameters()))


if __name__ == "__main__":
    main()
