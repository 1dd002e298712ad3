"""Federated rounds that build the net and its optimiser for each client; once with `mended`."""

import copy
import sys

import torch
from torch import nn


def build():
    return nn.Sequential(*[nn.Sequential(nn.Linear(600, 600), nn.ReLU()) for _ in range(8)])


torch.manual_seed(0)
model = build()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
state = copy.deepcopy(model.state_dict())
data = torch.randn(4, 4, 600)
for _ in range(400):
    for client in range(4):
        if "mended" not in sys.argv:
            model = build()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model.load_state_dict(state)
        optimizer.zero_grad()
        model(data[client]).square().mean().backward()
        optimizer.step()
        state = copy.deepcopy(model.state_dict())
