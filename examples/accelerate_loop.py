"""A net of segmentation-models-pytorch on photos of many sizes, under Accelerate.

accelerate launch examples/accelerate_loop.py FOLDER    with images/*.jpg and masks/*.png
"""

import sys
from pathlib import Path

import numpy as np
import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from PIL import Image
from torch.utils.data import DataLoader

import anysize


class Photos(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.images = sorted(Path(folder, "images").glob("*.jpg"))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        mask = self.images[i].parents[1] / "masks" / f"{self.images[i].stem}.png"
        pixels = torch.from_numpy(np.array(Image.open(self.images[i]))).permute(2, 0, 1) / 255
        return pixels, torch.from_numpy(np.array(Image.open(mask))).long()


accelerator = Accelerator(mixed_precision="bf16")
photos = Photos(sys.argv[1])
net = smp.FPN("resnet18", encoder_weights=None, classes=3)
batches = anysize.CanvasBatches(photos, anysize.geometry_of_net(net), images_per_batch=4)
loader = DataLoader(photos, batch_sampler=batches, collate_fn=batches.collate)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(anysize.on_canvas(net), optimizer, loader)
for epoch in range(5):
    batches.set_epoch(epoch)
    model.train()
    for pixels, target, layout in loader:
        loss = F.cross_entropy(model(pixels, layout).float(), target, ignore_index=255)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
    accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}")
accelerator.save(net.state_dict(), "fpn.safetensors", safe_serialization=True)
