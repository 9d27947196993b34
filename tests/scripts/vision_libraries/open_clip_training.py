"""open_clip: a tiny CLIP from its own config classes, its contrastive loss, logit scale clamped, zero-shot weights."""

import math

import torch
from open_clip.loss import ClipLoss
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
model = CLIP(
    embed_dim=32,
    vision_cfg=CLIPVisionCfg(layers=2, width=48, head_width=12, patch_size=8, image_size=32),
    text_cfg=CLIPTextCfg(context_length=16, vocab_size=100, width=48, heads=4, layers=2),
).to(device)
loss_fn = ClipLoss()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), eps=1e-6)
for step in range(3):
    images, texts = torch.rand(8, 3, 32, 32).to(device), torch.randint(1, 100, (8, 16)).to(device)
    image_features, text_features, logit_scale = model(images, texts)
    loss = loss_fn(image_features, text_features, logit_scale)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        model.logit_scale.clamp_(0, math.log(100))
    print(f"step {step} loss {loss.item():.4f} scale {logit_scale.item():.3f}")
with torch.no_grad():
    classes = torch.stack(
        [model.encode_text(torch.randint(1, 100, (3, 16), device=device), normalize=True).mean(0) for _ in range(5)],
        dim=1,
    )
    logits = 100.0 * model.encode_image(images, normalize=True) @ classes
print("zero-shot", tuple(logits.shape), "top", tuple(logits.topk(2, dim=-1).indices.shape))
