"""A compiled net of one size: nothing to find."""

import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Conv2d(3, 48, 3, 2, 1), nn.ReLU()]
for _ in range(3):
    layers += [nn.Conv2d(48, 48, 3, 1, 1), nn.ReLU()]
net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))
model = torch.compile(net, backend="aot_eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for _ in range(600):
    loss = nn.functional.cross_entropy(model(torch.randn(16, 3, 64, 64)), torch.zeros(16).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
