"""One layer gives up channels-last; with `mended` it keeps it."""

import sys

import torch
from torch import nn


class Reorder(nn.Module):
    def forward(self, x):
        return x if "mended" in sys.argv else x.contiguous()


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2, 1),
    Reorder(),
    nn.MaxPool2d(3, 1, 1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.MaxPool2d(3, 1, 1),
    nn.Conv2d(32, 32, 3, 2, 1),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(32, 10),
).to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x = torch.randn(16, 3, 96, 96).contiguous(memory_format=torch.channels_last)
for _ in range(600):
    loss = nn.functional.cross_entropy(model(x), torch.zeros(16).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
