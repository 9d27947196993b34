"""Unconditional image generation with diffusers and Accelerate, as train_unconditional.py: EMA, noise scheduler, sampling pipeline."""

import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="fp16" if torch.cuda.is_available() else "no", gradient_accumulation_steps=1)
model = UNet2DModel(
    sample_size=16,
    in_channels=3,
    out_channels=3,
    layers_per_block=1,
    block_out_channels=(16, 32),
    norm_num_groups=8,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
ema_model = EMAModel(
    model.parameters(), decay=0.999, use_ema_warmup=True, model_cls=UNet2DModel, model_config=model.config
)
noise_scheduler = DDPMScheduler(num_train_timesteps=100, beta_schedule="linear", prediction_type="epsilon")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.95, 0.999), weight_decay=1e-6)
loader = torch.utils.data.DataLoader(
    [{"input": torch.rand(3, 16, 16) * 2 - 1} for _ in range(16)], batch_size=4, shuffle=True
)
lr_scheduler = get_scheduler("cosine", optimizer=optimizer, num_warmup_steps=2, num_training_steps=8)
model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)
ema_model.to(accelerator.device)
global_step = 0
for epoch in range(2):
    model.train()
    for batch in loader:
        clean_images = batch["input"]
        noise = torch.randn(clean_images.shape, device=clean_images.device)
        timesteps = torch.randint(0, 100, (clean_images.shape[0],), device=clean_images.device).long()
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        with accelerator.accumulate(model):
            model_output = model(noisy_images, timesteps).sample
            loss = F.mse_loss(model_output.float(), noise.float())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            ema_model.step(model.parameters())
            global_step += 1
        print(
            f"step {global_step} loss {loss.detach().item():.4f} lr {lr_scheduler.get_last_lr()[0]:.2e} ema {ema_model.cur_decay_value:.4f}"
        )
unet = accelerator.unwrap_model(model)
ema_model.store(unet.parameters())
ema_model.copy_to(unet.parameters())
pipeline = DDPMPipeline(unet=unet, scheduler=noise_scheduler)
pipeline.set_progress_bar_config(disable=True)
images = pipeline(
    generator=torch.Generator(device=pipeline.device).manual_seed(0),
    batch_size=2,
    num_inference_steps=5,
    output_type="np",
).images
print("images", images.shape, images.dtype)
ema_model.restore(unet.parameters())
pipeline.save_pretrained("ddpm")
print(sorted(os.listdir("ddpm")))
