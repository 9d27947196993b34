"""timm's validate.py in short: several architectures in evaluation, channels_last, half precision, top-1 and top-5."""

import timm
import torch
from timm.utils import AverageMeter, accuracy

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(0)
for name in ("mobilenetv3_small_050", "vit_tiny_patch16_224", "efficientnet_b0", "convnext_atto"):
    options = {"img_size": 64} if name.startswith("vit") else {}
    model = timm.create_model(name, num_classes=10, **options).to(device, memory_format=torch.channels_last).eval()
    top1, top5 = AverageMeter(), AverageMeter()
    with torch.inference_mode():
        for _ in range(2):
            input = torch.rand(4, 3, 64, 64).to(device).contiguous(memory_format=torch.channels_last)
            target = torch.randint(0, 10, (4,)).to(device)
            acc1, acc5 = accuracy(model(input).detach(), target, topk=(1, 5))
            top1.update(acc1.item(), input.size(0))
            top5.update(acc5.item(), input.size(0))
    print(
        f"{name}: {sum(p.numel() for p in model.parameters())} parameters, {top1.count} images, acc@1 {top1.avg:.2f} acc@5 {top5.avg:.2f}"
    )
