"""Averages the time of a batch and of the wait for it from round to round: nothing to find."""

import time

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class AverageMeter:
    def __init__(self, name):
        self.name, self.sum, self.count = name, 0.0, 0

    def update(self, value):
        self.sum += value
        self.count += 1

    def __str__(self):
        return f"{self.name} {self.sum / self.count:.3f}"


def train(loader, model, criterion, optimizer, epoch):
    batch_time, data_time = AverageMeter("batch"), AverageMeter("data")
    end = time.time()
    for i, (images, target) in enumerate(loader):
        data_time.update(time.time() - end)
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % 10 == 0:
            print(f"epoch {epoch} [{i}/{len(loader)}] {batch_time} {data_time}")


def main():
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
        train(loader, model, nn.CrossEntropyLoss(), optimizer, epoch)


if __name__ == "__main__":
    main()
