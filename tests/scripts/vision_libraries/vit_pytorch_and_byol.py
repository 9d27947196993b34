"""lucidrains' packages: ViT with patch dropout, SimpleViT distilled, x-transformers' autoregressive wrapper, vector quantisation, diffusion."""

import torch
from denoising_diffusion_pytorch import GaussianDiffusion, Unet
from ema_pytorch import EMA
from lion_pytorch import Lion
from vector_quantize_pytorch import VectorQuantize
from vit_pytorch import SimpleViT, ViT
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
images, labels = torch.rand(4, 3, 32, 32, device=device), torch.tensor([0, 1, 2, 1], device=device)
for model in (
    ViT(image_size=32, patch_size=8, num_classes=3, dim=48, depth=2, heads=4, mlp_dim=96, dropout=0.1),
    SimpleViT(image_size=32, patch_size=8, num_classes=3, dim=48, depth=2, heads=4, mlp_dim=96),
):
    model = model.to(device)
    optimizer = Lion(model.parameters(), lr=1e-4, weight_decay=1e-2)
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    print(type(model).__name__, f"loss {loss.item():.4f}")

lm = AutoregressiveWrapper(
    TransformerWrapper(
        num_tokens=64,
        max_seq_len=48,
        attn_layers=Decoder(dim=48, depth=2, heads=4, rotary_pos_emb=True, attn_flash=True),
    )
).to(device)
optimizer = torch.optim.Adam(lm.parameters(), lr=1e-3)
for _ in range(2):
    loss = lm(torch.randint(0, 64, (2, 33), device=device))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(lm.parameters(), 0.5)
    optimizer.step()
sample = lm.generate(torch.randint(0, 64, (1, 4), device=device), 20, temperature=0.8)
print(f"x-transformers loss {loss.item():.4f} generated {tuple(sample.shape)}")

vq = VectorQuantize(dim=16, codebook_size=32, decay=0.8, commitment_weight=1.0).to(device)
quantized, indices, commit_loss = vq(torch.randn(2, 20, 16, device=device))
print("codes", tuple(indices.shape), "inside", bool((indices < 32).all()), f"commitment {commit_loss.item():.4f}")

diffusion = GaussianDiffusion(
    Unet(dim=8, dim_mults=(1, 2), flash_attn=False), image_size=16, timesteps=20, sampling_timesteps=3
).to(device)
ema = EMA(diffusion, beta=0.99, update_every=1)
optimizer = torch.optim.Adam(diffusion.parameters(), lr=1e-4)
for _ in range(2):
    loss = diffusion(torch.rand(2, 3, 16, 16, device=device))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update()
print(f"diffusion loss {loss.item():.4f} sampled", tuple(ema.ema_model.sample(batch_size=2).shape))
