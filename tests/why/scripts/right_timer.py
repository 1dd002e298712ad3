"""Times each of its steps with `time.time()`, and rightly: nothing to find."""

import time

import torch
from torch import nn

torch.manual_seed(0)
layers = [nn.Conv2d(3, 48, 3, 2, 1), nn.ReLU()]
for _ in range(3):
    layers += [nn.Conv2d(48, 48, 3, 1, 1), nn.ReLU()]
model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
started = time.time()
took = []
for step in range(600):
    x, y = torch.randn(16, 3, 64, 64), torch.zeros(16).long()
    began = time.time()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    took.append(time.time() - began)
    if step % 20 == 19:
        print(f"step {step} loss {loss.item():.3f}, {1000 * sum(took[-20:]) / 20:.1f} ms a step")
print(f"{time.time() - started:.1f} s in all")
