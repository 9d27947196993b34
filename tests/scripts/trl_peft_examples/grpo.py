"""Group relative policy optimisation with TRL's GRPOTrainer and a reward function on the completions' lengths."""

from _local import rng, sentence, tokenizer
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, set_seed
from trl import GRPOConfig, GRPOTrainer

set_seed(0)
random = rng(4)
tok = tokenizer(pairs=False, side="left")
model = LlamaForCausalLM(
    LlamaConfig(
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
)
train = Dataset.from_list([{"prompt": sentence(random, 3, 8)} for _ in range(8)])
calls = []


def reward_len(completions, **kwargs):
    calls.append(len(completions))
    return [-abs(10 - len(c.split())) / 10 for c in completions]


args = GRPOConfig(
    "grpo",
    max_steps=2,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=12,
    report_to="none",
    logging_steps=1,
    disable_tqdm=True,
    bf16=False,
    gradient_checkpointing=False,
    save_strategy="no",
)
trainer = GRPOTrainer(model=model, reward_funcs=reward_len, args=args, train_dataset=train, processing_class=tok)
result = trainer.train()
print("steps", result.global_step, "completions rewarded", calls)
