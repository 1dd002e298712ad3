"""One small image a step; with `mended` four a step, and so a quarter of the steps."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU()]
for _ in range(12):
    layers += [nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
batch = 4 if "mended" in sys.argv else 1
for _ in range(2000):
    x = torch.randn(batch, 3, 16, 16)
    loss = nn.functional.cross_entropy(model(x), torch.zeros(batch).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
