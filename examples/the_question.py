"""The script that Anysize began with, in PyTorch: why does it train so slowly?

    anysize why --steps 20 examples/the_question.py
    python examples/the_question.py --images 20 --canvas      the same with the cure

It trains a residual net on photos of any size, one a step, to say which of 15 things are in each
(15 sigmoids), and times its steps.

What stands for what: in 2016 it was a TensorFlow graph whose convolutions were tuned anew for each
shape that came. Plain PyTorch on a CPU hardly minds a new shape, and `anysize why` says how little
that costs (`--eager`). A graph that is made for a shape does mind, and
`torch.compile(dynamic=False)` is that. Its cheapest backend is used, which generates no code, so
that the cost shown is the least one. And like TensorFlow then, it does not give up after some
shapes.
"""

import argparse
import random
from datetime import datetime
from pathlib import Path

import torch
from torch import nn

NUM_CLASSES = 15
CANVAS = (320, 320)


class Block(nn.Module):
    """Bottleneck of three convolutions."""

    def __init__(self, inputs, width, stride):
        super().__init__()
        self.reduce = nn.Sequential(nn.Conv2d(inputs, width, 1), nn.BatchNorm2d(width), nn.ReLU())
        self.middle = nn.Sequential(
            nn.Conv2d(width, width, 3, stride, 1), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.expand = nn.Sequential(nn.Conv2d(width, 4 * width, 1), nn.BatchNorm2d(4 * width))
        self.shortcut = nn.Conv2d(inputs, 4 * width, 1, stride)

    def forward(self, x):
        return torch.relu(self.expand(self.middle(self.reduce(x))) + self.shortcut(x))


def resnet(units=(2, 2, 2, 2), width=32):
    layers = [nn.Conv2d(3, width, 7, 2, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inputs = width
    for level, num_blocks in enumerate(units):
        for block in range(num_blocks):
            layers.append(Block(inputs, width << level, 2 if level and not block else 1))
            inputs = 4 * (width << level)
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, NUM_CLASSES)
    )


def photos(folder, count):
    """Images of any size: of a folder, or drawn."""
    if folder:
        import numpy as np
        from PIL import Image

        for path in sorted(folder.iterdir())[:count]:
            pixels = np.array(Image.open(path).convert("RGB"))
            yield torch.from_numpy(pixels).permute(2, 0, 1)[None].float() / 255
        return
    sizes = random.Random(0)
    for _ in range(count):
        yield torch.rand(1, 3, sizes.randint(160, 320), sizes.randint(160, 320))


def on_canvas(image):
    """The cure in its simplest form: all images on one shape. Anysize does this exactly."""
    canvas = torch.zeros(1, 3, *CANVAS)
    image = image[:, :, : CANVAS[0], : CANVAS[1]]
    canvas[:, :, : image.shape[2], : image.shape[3]] = image
    return canvas


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--photos", type=Path, help="folder of images; without it they are drawn")
    parser.add_argument("--canvas", action="store_true", help="place every image on one canvas")
    parser.add_argument("--eager", action="store_true", help="no graph")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    net = resnet()
    model = net
    if not arguments.eager:
        torch._dynamo.config.recompile_limit = arguments.images + 1
        model = torch.compile(net, dynamic=False, backend="aot_eager")
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    criterion = nn.BCEWithLogitsLoss()

    started = datetime.now()
    for number, image in enumerate(photos(arguments.photos, arguments.images), 1):
        if arguments.canvas:
            image = on_canvas(image)
        labels = torch.zeros(1, NUM_CLASSES)
        labels[0, number % NUM_CLASSES] = 1
        before = datetime.now()
        optimizer.zero_grad()
        loss = criterion(model(image), labels)
        loss.backward()
        optimizer.step()
        duration = (datetime.now() - before).microseconds / 1e6
        print(f"image {number} {tuple(image.shape[2:])} loss {loss.item():.3f} {duration:.3f} s")
    print(f"all images: {(datetime.now() - started).total_seconds():.1f} s")


if __name__ == "__main__":
    main()
