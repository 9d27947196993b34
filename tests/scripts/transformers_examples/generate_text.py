"""Text generation with a KV cache: greedy, sampling, beams, batch with left padding and stopping by length."""

import torch
from _local import tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, set_seed

set_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
tok = tokenizer(pairs=False, side="left")
config = LlamaConfig(
    vocab_size=len(tok),
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    eos_token_id=None,
    pad_token_id=0,
    bos_token_id=2,
)
model = LlamaForCausalLM(config).to(device).eval()
inputs = tok(
    ["the big cat sees", "a dog runs and a bird eats the red book"],
    return_tensors="pt",
    padding=True,
    return_token_type_ids=False,
).to(device)
print("prompt", tuple(inputs["input_ids"].shape), "tokens", int(inputs["attention_mask"].sum()))
for name, options in {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "top_k": 10, "top_p": 0.9},
    "beams": {"num_beams": 3, "do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.2, "no_repeat_ngram_size": 3},
}.items():
    out = model.generate(**inputs, max_new_tokens=40, **options)
    print(name, tuple(out.shape), len(tok.batch_decode(out, skip_special_tokens=True)), "texts")
out = model.generate(
    **inputs,
    generation_config=GenerationConfig(
        max_new_tokens=8, return_dict_in_generate=True, output_scores=True, pad_token_id=0
    ),
)
print("scores", len(out.scores), tuple(out.scores[0].shape), "cache length", out.past_key_values.get_seq_length())
