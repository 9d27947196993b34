"""Encoder-decoder generation with an end token: BART, a batch of sources, at most 60 new tokens."""

import torch
from _local import rng, sentence, tokenizer
from transformers import BartConfig, BartForConditionalGeneration, set_seed

set_seed(0)
random = rng(11)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
tok = tokenizer()
config = BartConfig(
    vocab_size=len(tok),
    d_model=64,
    encoder_layers=2,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=128,
    decoder_ffn_dim=128,
    max_position_embeddings=128,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=3,
    decoder_start_token_id=3,
    forced_eos_token_id=3,
)
model = BartForConditionalGeneration(config).to(device).eval()
model.lm_head.weight.data[3] = 0
for size in (1, 4):
    batch = tok(
        [sentence(random) for _ in range(size)], padding=True, return_tensors="pt", return_token_type_ids=False
    ).to(device)
    with torch.inference_mode():
        out = model.generate(**batch, max_new_tokens=60, min_new_tokens=60, num_beams=2)
    print(size, "sources, generated", tuple(out.shape))
