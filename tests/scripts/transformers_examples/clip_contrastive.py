"""Contrastive image-text training of a tiny CLIP, as run_clip.py."""

import torch
from _local import rng, sentence, tokenizer
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPVisionConfig, set_seed

set_seed(0)
random = rng(12)
device = "cuda" if torch.cuda.is_available() else "cpu"
tok = tokenizer()
text = CLIPTextConfig(
    vocab_size=len(tok),
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=32,
    eos_token_id=3,
    bos_token_id=2,
    pad_token_id=0,
)
vision = CLIPVisionConfig(
    hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
)
model = CLIPModel(CLIPConfig(text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=32)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for step in range(3):
    batch = tok(
        [sentence(random) for _ in range(8)],
        padding=True,
        truncation=True,
        max_length=32,
        return_tensors="pt",
        return_token_type_ids=False,
    ).to(device)
    out = model(**batch, pixel_values=torch.rand(8, 3, 32, 32, device=device), return_loss=True)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    accuracy = (out.logits_per_image.argmax(1) == torch.arange(8, device=device)).float().mean()
    print(
        f"step {step} text {batch['input_ids'].shape[1]} logits {tuple(out.logits_per_image.shape)} loss {out.loss.item():.4f} accuracy {accuracy.item():.3f}"
    )
