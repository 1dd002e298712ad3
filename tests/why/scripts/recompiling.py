"""A compiled net reads a number of Python that changes each step; with `mended` it stays."""

import sys

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        layers = [nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU()]
        for _ in range(3):
            layers += [nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU()]
        self.layers = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)
        )
        self.epoch = 0

    def forward(self, x):
        return self.layers(x) / (1 + self.epoch)


torch._dynamo.config.recompile_limit = 1000
torch.manual_seed(0)
net = Net()
model = torch.compile(net, dynamic=False, backend="aot_eager")
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for step in range(600):
    net.epoch = 0 if "mended" in sys.argv else step
    loss = nn.functional.cross_entropy(model(torch.randn(12, 3, 96, 96)), torch.zeros(12).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
