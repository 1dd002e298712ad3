"""A module with a `training_step` that the optimiser calls as a closure: nothing to find."""

import torch
from torch import nn


class Task(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(),
            nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 4, 1),
        )  # fmt: skip
        self.criterion = nn.CrossEntropyLoss()

    def training_step(self, batch):
        images, labels = batch
        return self.criterion(self.net(images), labels)


class Trainer:
    def __init__(self, task):
        self.task, self.optimizer = task, torch.optim.Adam(task.parameters())

    def fit(self, batch, num_steps):
        for _ in range(num_steps):

            def closure():
                loss = self.task.training_step(batch)
                self.optimizer.zero_grad()
                loss.backward()
                return loss

            self.optimizer.step(closure)


torch.manual_seed(0)
Trainer(Task()).fit((torch.randn(8, 3, 64, 64), torch.randint(0, 4, (8, 64, 64))), 1000)
