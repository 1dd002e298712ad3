"""Takes a step with all memory, and again with a limit that only smaller passes keep."""

import resource
from pathlib import Path

import torch

from anysize.config import ModelConfig, OptimConfig
from anysize.data.batch import Batch
from anysize.geometry import Canvas, NetGeometry, Size, padded_batch, target_canvas, target_rect
from anysize.models.build import build_model
from anysize.training.losses import CrossEntropy
from anysize.training.memory import PassLimit, Tally
from anysize.training.optim import build_optimizer
from anysize.training.step import train_step

GEOMETRY = NetGeometry(16)
SIZES = [Size(500, 512), Size(512, 400), Size(480, 512), Size(300, 300)]


def make_batch():
    generator = torch.Generator().manual_seed(0)
    canvas = Canvas(4, 512 + 4, 512 + 4)
    layout = padded_batch(SIZES, canvas, GEOMETRY)
    pixels = torch.zeros(4, canvas.height, canvas.width, 3)
    labels = target_canvas(canvas, GEOMETRY, "grid")
    target = torch.full((4, labels.height, labels.width), 255, dtype=torch.uint8)
    for p in layout.placements:
        inside = pixels[p.slot, p.top : p.top + p.height, p.left : p.left + p.width]
        inside.normal_(generator=generator)
        r = target_rect(p, GEOMETRY, "grid")
        target[r.slot, r.top : r.top + r.height, r.left : r.left + r.width] = torch.randint(
            0, 3, (r.height, r.width), generator=generator, dtype=torch.uint8
        )
    return Batch(
        pixels=pixels.permute(0, 3, 1, 2).double(),
        target=target,
        layout=layout,
        stems=("a", "b", "c", "d"),
        geometry=GEOMETRY,
        loss_at="grid",
    )


def step(batch, limit):
    config = ModelConfig(units=(1, 1, 1, 1), base_depth=16)
    model = build_model(config, 3, generator=torch.Generator().manual_seed(0)).double().train()
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3))
    train_step(model, CrossEntropy(), [batch], optimizer, pass_limit=limit)
    return torch.cat([t.detach().flatten() for t in model.state_dict().values()])


def memory_bytes():
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if "VmSize" in x]
    return int(line.split()[1]) * 1024


def main():
    torch.set_num_threads(1)
    batch = make_batch()
    limit = PassLimit(tally=Tally(), ignore_index=255)
    room = memory_bytes() + 300 * 2**20
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (room, before[1]))
    scarce = step(batch, limit)
    resource.setrlimit(resource.RLIMIT_AS, before)
    whole = step(batch, None)
    worst = float((scarce - whole).abs().max())
    print(f"limit {limit.tally.max_pass_pixels} of {batch.layout.canvas.pixels}, worst {worst:.1e}")
    assert limit.tally.max_pass_pixels is not None, "memory did not run out: nothing was tested"
    assert worst < 1e-12
    print("split: the same step")


if __name__ == "__main__":
    main()
