"""Anomaly detection was left on, for the whole run or around each step; with `mended` it is off."""

import contextlib
import sys

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(20)])
optimizer = torch.optim.Adam(model.parameters())
around = contextlib.nullcontext
if "mended" not in sys.argv:
    if "around" in sys.argv:
        around = torch.autograd.detect_anomaly
    else:
        torch.autograd.set_detect_anomaly(True)
x = torch.randn(64, 64)
for _ in range(3000):
    optimizer.zero_grad()
    with around():
        loss = model(x).square().mean()
        loss.backward()
    optimizer.step()
