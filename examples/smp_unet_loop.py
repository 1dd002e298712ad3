"""A U-Net of segmentation-models-pytorch on photos of many sizes, in an ordinary loop.

python examples/smp_unet_loop.py FOLDER    with images/*.jpg and masks/*.png of class ids
"""

import sys
from pathlib import Path

import numpy as np
import segmentation_models_pytorch as smp
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import anysize


class Photos(Dataset):
    def __init__(self, folder):
        self.images = sorted(Path(folder, "images").glob("*.jpg"))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        mask = self.images[i].parents[1] / "masks" / f"{self.images[i].stem}.png"
        pixels = torch.from_numpy(np.array(Image.open(self.images[i]))).permute(2, 0, 1) / 255
        return pixels, torch.from_numpy(np.array(Image.open(mask))).long()


photos = Photos(sys.argv[1])
net = smp.Unet("resnet18", encoder_weights=None, classes=3)
model = anysize.on_canvas(net).train()
batches = anysize.CanvasBatches(photos, anysize.geometry_of_net(net), images_per_batch=4)
loader = DataLoader(photos, batch_sampler=batches, collate_fn=batches.collate)
optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
for epoch in range(5):
    batches.set_epoch(epoch)
    losses = []
    for pixels, target, layout in loader:
        loss = F.cross_entropy(model(pixels, layout), target, ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(f"epoch {epoch}: loss {np.mean(losses):.3f}")
torch.save(net.state_dict(), "unet.pt")
