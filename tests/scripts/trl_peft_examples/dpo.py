"""Direct preference optimisation with TRL's DPOTrainer."""

from _local import rng, sentence, tokenizer
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import DPOConfig, DPOTrainer

set_seed(0)
random = rng(2)
tok = tokenizer(pairs=False)
config = LlamaConfig(
    vocab_size=len(tok),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=3,
)
model, ref_model = LlamaForCausalLM(config), LlamaForCausalLM(config)
train = Dataset.from_list(
    [
        {"prompt": sentence(random, 3, 8) + " ", "chosen": sentence(random, 3, 8), "rejected": sentence(random, 3, 8)}
        for _ in range(12)
    ]
)
args = DPOConfig(
    "dpo",
    max_steps=3,
    per_device_train_batch_size=4,
    report_to="none",
    logging_steps=1,
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=False,
    save_strategy="no",
    beta=0.1,
)
trainer = DPOTrainer(
    model=model,
    ref_model=ref_model,
    args=args,
    train_dataset=train,
    eval_dataset=train.select(range(4)),
    processing_class=tok,
)
result = trainer.train()
print(
    "steps",
    result.global_step,
    f"loss {result.training_loss:.4f}",
    sorted(k for k in trainer.evaluate() if k.startswith("eval_rewards")),
)
