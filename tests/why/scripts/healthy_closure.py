"""LBFGS evaluates the loss ten times a step: nothing to find."""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(),
    nn.Conv2d(64, 4, 1),
)  # fmt: skip
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=10)
images = torch.randn(8, 3, 64, 64)


def closure():
    optimizer.zero_grad()
    loss = model(images).square().mean()
    loss.backward()
    return loss


for _ in range(200):
    optimizer.step(closure)
