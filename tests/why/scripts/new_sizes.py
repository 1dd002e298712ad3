"""A graph for each size, and every step a new size.

With `ten`, ten sizes; with `mended`, one size of as many pixels; with `eager`, no graph.
"""

import random
import sys

import torch
from torch import nn

torch.manual_seed(0)
rng = random.Random(0)
layers = [nn.Conv2d(3, 24, 3, 2, 1), nn.ReLU()]
for _ in range(10):
    layers += [nn.Conv2d(24, 24, 3, 1, 1), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10))
net = model
if "eager" not in sys.argv:
    torch._dynamo.config.recompile_limit = 1000
    model = torch.compile(net, dynamic=False, backend="aot_eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
sizes = rng.sample([(h, w) for h in range(48, 80) for w in range(48, 80)], 600)
if "ten" in sys.argv:
    sizes = sizes[:10] * 60
if "mended" in sys.argv:
    sizes = [(64, 64)] * 600
for h, w in sizes:
    loss = nn.functional.cross_entropy(model(torch.randn(10, 3, h, w)), torch.arange(10))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
