"""16 workers are started for each short epoch; with `mended` it is one."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.zeros(96, 3, 56, 56), torch.zeros(96).long())
loader = DataLoader(data, batch_size=16, num_workers=1 if "mended" in sys.argv else 16)

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
for _ in range(60):
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
