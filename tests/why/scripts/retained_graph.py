"""Accumulates by backward over a running sum, which walks 10 graphs; 4 with `mended`."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3), nn.ReLU(), nn.Conv2d(32, 4, 1)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
images = torch.randn(4, 4, 3, 48, 48)
for _ in range(400):
    optimizer.zero_grad()
    total = torch.zeros(())
    for part in images:
        loss = model(part).square().mean()
        total = total + loss
        if "mended" in sys.argv:
            loss.backward()
        else:
            torch.autograd.backward(total, retain_graph=True)
    optimizer.step()
