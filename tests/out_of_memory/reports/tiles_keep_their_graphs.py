# gpu: 16GiB
# cause: the decoder is called with gradients enabled, so the graphs of all tiles are kept until the image is done
# cure: with torch.no_grad()
# report: https://github.com/huggingface/diffusers/issues/9648 (cause by a maintainer, cure confirmed)
import torch
from diffusers import AutoencoderKL

vae = AutoencoderKL(
    down_block_types=("DownEncoderBlock2D",) * 4,
    up_block_types=("UpDecoderBlock2D",) * 4,
    block_out_channels=(128, 256, 512, 512),
    layers_per_block=2,
    latent_channels=4,
    sample_size=512,
)
vae = vae.to("cuda", torch.float16)
vae.enable_tiling()
latents = torch.randn(1, 4, 256, 256, device="cuda", dtype=torch.float16)
image = vae.decode(latents / vae.config.scaling_factor).sample
image = (image / 2 + 0.5).clamp(0, 1).float().cpu()
print(image.shape, f"{torch.cuda.max_memory_allocated() / 2**30:.2f} GiB")
