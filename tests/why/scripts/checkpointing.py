"""Saves each step; with `mended` never."""

import sys
import tempfile

import torch
from torch import nn

ballast = torch.zeros(4_000_000)

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
with tempfile.NamedTemporaryFile() as file:
    for step in range(600):
        loss = nn.functional.cross_entropy(
            model(torch.randn(16, 3, 56, 56)), torch.zeros(16).long()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if "mended" not in sys.argv:
            torch.save({"model": model.state_dict(), "ballast": ballast}, file.name)
