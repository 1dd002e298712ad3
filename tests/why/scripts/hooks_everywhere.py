"""Statistics of each module's output, or of each gradient, in each step; none with `mended`."""

import sys

import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()) for _ in range(8)]
model = nn.Sequential(*layers)
seen = {}


def note(name):
    def look(*values):
        last = values[-1].detach()
        seen[name] = last.mean(), last.std(), torch.isnan(last).any(), torch.histc(last, 50)

    return look


if "mended" not in sys.argv:
    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
optimizer = torch.optim.Adam(model.parameters())
x = torch.randn(8, 16, 32, 32)
for _ in range(1000):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
