"""Its timer drops whole seconds; with `mended` it does not."""

import sys
from datetime import datetime

import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Conv2d(3, 96, 3, 2, 1), nn.ReLU()]
for _ in range(5):
    layers += [nn.Conv2d(96, 96, 3, 1, 1), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(10, 3, 256, 256), torch.zeros(10).long()
for _ in range(100):
    began = datetime.now()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    took = datetime.now() - began
    optimizer.zero_grad()
    print(took.total_seconds() if "mended" in sys.argv else took.microseconds / 1e6)
