"""Two nets and two optimisers in turn: nothing to find."""

import torch
from torch import nn

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 784))
critic = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1))
of_generator = torch.optim.SGD(generator.parameters(), lr=0.01)
of_critic = torch.optim.SGD(critic.parameters(), lr=0.01)
criterion = nn.BCEWithLogitsLoss()
one, zero = torch.ones(256, 1), torch.zeros(256, 1)
real = torch.randn(256, 784)
for _ in range(1000):
    fake = generator(torch.randn(256, 64))
    of_critic.zero_grad()
    (criterion(critic(real), one) + criterion(critic(fake), zero)).backward()
    of_critic.step()
    of_generator.zero_grad()
    criterion(critic(generator(torch.randn(256, 64))), one).backward()
    of_generator.step()
