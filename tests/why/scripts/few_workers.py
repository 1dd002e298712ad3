"""One worker waits for a slow disk; with `mended` there are enough of them."""

import sys
import time

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class SlowDisk(Dataset):
    def __len__(self):
        return 6400

    def __getitem__(self, index):
        time.sleep(0.01)
        return torch.full((3, 56, 56), index / 6400), index % 10


loader = DataLoader(SlowDisk(), batch_size=16, num_workers=8 if "mended" in sys.argv else 1)

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(32, 48, 3, 1, 1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(48, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x, y in loader:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
