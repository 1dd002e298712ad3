"""Many more threads than cores; with `mended` as many as there are."""

import os
import sys

import torch
from torch import nn

cores = len(os.sched_getaffinity(0))
torch.set_num_threads(cores if "mended" in sys.argv else 8 * cores)

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
for step in range(600):
    x, y = torch.randn(16, 3, 56, 56), torch.zeros(16).long()
    logits = model(x)
    loss = nn.functional.cross_entropy(logits, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
