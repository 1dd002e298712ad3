"""A penalty over all earlier losses makes each step longer; with `mended` it is a mean."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.randn(4, 3, 48, 48)
for step in range(400):
    loss = model(images).square().mean()
    if "mended" not in sys.argv:
        for _ in range(60 * max(0, step - 20)):
            loss = loss + 1e-9 * model[0].weight.square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
