"""A classifier of one size with cheap data: nothing to find."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

generator = torch.Generator().manual_seed(0)
images = torch.randn(320, 3, 48, 48, generator=generator)
labels = torch.randint(0, 10, (320,), generator=generator)
loader = DataLoader(TensorDataset(images, labels), batch_size=16, shuffle=True)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 32, 3, 2, 1),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, 1, 1),
    nn.ReLU(),
    nn.Conv2d(64, 64, 3, 1, 1),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(64, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(100):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch} loss {loss.item():.3f}")
