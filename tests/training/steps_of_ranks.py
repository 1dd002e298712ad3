"""Twenty steps of small nets, on as many ranks as `torchrun` starts; writes what is learned.

torchrun --nproc-per-node 2 tests/training/steps_of_ranks.py OUT
"""

import functools
import hashlib
import sys
from pathlib import Path

import torch
from torch import nn

from anysize.config import ModelConfig
from anysize.data.batch import Batch, cut_out
from anysize.data.batching import epoch_steps
from anysize.geometry import Canvas, Rect, Size, target_canvas
from anysize.models.build import build_model
from anysize.models.on_canvas import geometry_of_net, on_canvas
from anysize.models.ops import set_lockstep
from anysize.planning.dealing import deal, deal_in_lockstep
from anysize.planning.packing import Plan
from anysize.ranks import join
from anysize.training.losses import CrossEntropy, SigmoidCrossEntropy
from anysize.training.step import train_step

# Of very different extents; 16 x 16 is a single cell at stride 16.
SIZES = [
    Size(*s)
    for s in (
        (16, 16), (96, 120), (40, 128), (33, 47), (70, 70), (18, 90), (64, 31), (24, 24),
        (100, 100), (50, 60), (17, 33), (80, 24), (96, 128),
    )
]  # fmt: skip
CANVASES = (Canvas(1, 128, 192), Canvas(2, 112, 128), Canvas(4, 128, 128), Canvas(1, 112, 128))
NUM_CLASSES = 3
NUM_STEPS = 20
CASES = {
    "frozen softmax": ("frozen", "softmax"),
    "frozen sigmoid": ("frozen", "sigmoid"),
    "trained softmax": ("trained", "softmax"),
    "trained sigmoid": ("trained", "sigmoid"),
    "on_canvas softmax": ("on_canvas", "softmax"),
    "float32 trained softmax": ("trained", "softmax"),
    "bf16 frozen softmax": ("frozen", "softmax"),
    "control: own count": ("frozen", "softmax"),
    "control: own statistics": ("trained", "softmax"),
}


def small_net(kind, generator):
    if kind == "on_canvas":
        net = nn.Sequential(
            nn.Conv2d(3, 6, 3, stride=2, padding=1),
            nn.BatchNorm2d(6),
            nn.SiLU(),
            nn.Conv2d(6, 6, 3, padding=2, dilation=2),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, NUM_CLASSES, 3, padding=1),
        )
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        return on_canvas(net), geometry_of_net(net)
    config = ModelConfig(units=(1, 1, 1, 1), base_depth=4, norm=kind, norm_decay=0.9)
    net = build_model(config, NUM_CLASSES, generator=generator)
    return net, net.geometry


def batch_of(work, data, geometry, dtype):
    canvas = work.layout.canvas
    pixels = torch.zeros(canvas.slots, 3, canvas.height, canvas.width, dtype=dtype)
    labels = target_canvas(canvas, geometry, "grid")
    target = torch.full((labels.slots, *data[0][1].shape[:-2], *labels[1:]), 255, dtype=torch.uint8)
    batch = Batch(
        pixels=pixels,
        target=target,
        layout=work.layout,
        stems=tuple(map(str, work.images)),
        geometry=geometry,
        loss_at="grid",
    )
    for index, placement, rect in zip(
        work.images, work.layout.placements, batch.rects, strict=True
    ):
        image, mask = data[index]
        cut_out(pixels, Rect(*placement)).copy_(image)
        cut_out(target, rect).copy_(mask[..., : rect.height, : rect.width])
    return batch


def images_and_labels(loss, generator, dtype):
    data = []
    for height, width in SIZES:
        image = torch.randn(3, height, width, generator=generator, dtype=torch.float64)
        shape = (height, width) if loss == "softmax" else (NUM_CLASSES, height, width)
        mask = torch.randint(NUM_CLASSES if loss == "softmax" else 2, shape, generator=generator)
        mask[torch.rand(shape, generator=generator) < 0.2] = 255
        data.append((image.to(dtype), mask.to(torch.uint8)))
    return data


@functools.cache
def steps_for(geometry):
    """Four an epoch, the last of a single image."""
    plan = Plan(
        geometry=geometry, images_per_step=4, max_pixels_per_step=1 << 20, canvases=CANVASES
    )
    return [s for e in range(5) for s in epoch_steps(plan, SIZES, seed=0, epoch=e)]


def learned(case, ranks):
    """Weights and moving statistics after the steps, and the losses.

    In low precision, in which small nets soon come apart: what one step changed.
    """
    kind, loss = CASES[case]
    low = case.split()[0] in ("float32", "bf16")
    dtype = torch.float32 if low else torch.float64
    generator = torch.Generator().manual_seed(3)
    net, geometry = small_net(kind, generator)
    net = net.to(dtype).train()
    data = images_and_labels(loss, generator, dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    criterion = CrossEntropy() if loss == "softmax" else SigmoidCrossEntropy()
    begun = {name: tensor.double() for name, tensor in net.state_dict().items()}
    lockstep = set_lockstep(net, ranks)
    if case == "control: own statistics":
        lockstep = None
        for module in net.modules():
            vars(module)["lockstep"] = None
    dealing = deal if lockstep is None else deal_in_lockstep
    losses = []
    for step in steps_for(geometry)[: NUM_STEPS if dtype == torch.float64 else 1]:
        own = dealing(step, ranks.size, geometry)[ranks.rank]
        batches = [batch_of(p, data, geometry, dtype) for p in own.passes]
        result = train_step(
            net,
            criterion,
            batches,
            optimizer,
            precision="bf16" if case.startswith("bf16") else "float32",
            count=sum(map(criterion.count, batches)) if case == "control: own count" else None,
            ranks=ranks,
            lockstep=lockstep,
        )
        assert not result.skipped
        losses.append(result.loss.double())
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    if low:
        state = {name: tensor.double() - begun[name] for name, tensor in state.items()}
    raw = b"".join(t.contiguous().numpy().tobytes() for t in state.values())
    digests = ranks.gather(hashlib.sha256(raw).hexdigest())
    if case != "control: own statistics":  # Its moving statistics are each rank's own.
        assert len(set(digests)) == 1, f"{case}: the ranks have come apart"
    return {**state, "losses": torch.stack(losses)}


def main():
    torch.set_num_threads(1)
    with join() as ranks:
        found = {case: learned(case, ranks) for case in CASES}
        if ranks.is_first:
            torch.save(found, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
