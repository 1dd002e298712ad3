"""NumPy's float64 finds its way in, and the net is made to match; with `mended` it is float32."""

import sys

import numpy as np
import torch
from torch import nn

rng = np.random.default_rng(0)

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
dtype = torch.float32 if "mended" in sys.argv else torch.float64
model.to(dtype)
images = torch.from_numpy(rng.normal(size=(16, 3, 56, 56))).to(dtype)
for _ in range(600):
    loss = nn.functional.cross_entropy(model(images), torch.zeros(16).long())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
