"""Norms with the statistics of valid cells, against sums taken by hand cell by cell, in float64."""

import copy

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from anysize.geometry import Canvas, Layout, Placement
from anysize.models import canvas_ops, ops
from anysize.models.on_canvas import on_canvas

SIZES = [(9, 14), (12, 7), (11, 11)]
PADDED = Layout(Canvas(4, 16, 17), tuple(Placement(i, 0, 0, *size) for i, size in enumerate(SIZES)))
MOSAIC = Layout(
    Canvas(2, 24, 26),
    (Placement(0, 0, 0, 9, 14), Placement(0, 10, 16, 12, 7), Placement(1, 3, 2, 11, 11)),
)


class Reference:
    """Convolution, norm and convolution of a list of images, of which none is on a canvas."""

    def __init__(self, net):
        self.first, self.norm, self.last = copy.deepcopy(net)
        self.parameters = [p for m in (self.first, self.norm, self.last) for p in m.parameters()]
        self.moving_mean, self.moving_variance = self.norm.running_mean, self.norm.running_var

    def __call__(self, images):
        maps = [self.first(image[None])[0] for image in images]
        num_channels = len(maps[0])
        cells = [m[:, i, j] for m in maps for i in range(m.shape[1]) for j in range(m.shape[2])]
        mean = sum(cells) / len(cells)
        squares = sum((cell - mean) ** 2 for cell in cells)
        std = (squares / len(cells) + self.norm.eps).sqrt()
        rate = self.norm.momentum
        self.moving_mean = (1 - rate) * self.moving_mean + rate * mean.detach()
        unbiased = squares.detach() / (len(cells) - 1)
        self.moving_variance = (1 - rate) * self.moving_variance + rate * unbiased
        outputs = []
        for m in maps:
            normed = [
                (m[c] - mean[c]) / std[c] * self.norm.weight[c] + self.norm.bias[c]
                for c in range(num_channels)
            ]
            outputs.append(self.last(torch.stack(normed)[None])[0])
        return outputs


def differences(layout):
    """Of outputs, gradients and moving statistics, over two training steps."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    net = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4, momentum=0.3), nn.Conv2d(4, 2, 3)
    ).double()
    with torch.no_grad():
        for p in net.parameters():
            p.copy_(drawn(*p.shape))
        net[0].bias += 30  # far from 0, so that a sum of squares would lose the variance
    reference, model = Reference(net), on_canvas(net).train()
    found = {"outputs": 0.0, "gradients": 0.0, "moving": 0.0}
    for _ in range(2):
        images = [drawn(3, *size) for size in SIZES]
        pixels = drawn(layout.canvas.slots, 3, *layout.canvas[1:]) * 100
        for image, p in zip(images, layout.placements, strict=True):
            pixels[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = image
        y = model(pixels, layout)
        ours = [layout.crop(y, i) for i in range(len(SIZES))]
        theirs = reference(images)
        weights = [drawn(*t.shape) for t in theirs]
        g = torch.autograd.grad(_weighed(ours, weights), list(net.parameters()))
        r = torch.autograd.grad(_weighed(theirs, weights), reference.parameters)
        scale = max(float(t.abs().max()) for t in r)
        pairs = zip(ours, theirs, strict=True)
        found["outputs"] = max(found["outputs"], *(_apart(a, b) for a, b in pairs))
        pairs = zip(g, r, strict=True)
        found["gradients"] = max(found["gradients"], *(_apart(a, b) / scale for a, b in pairs))
        norm = net[1]
        moving = (
            _apart(norm.running_mean, reference.moving_mean),
            _apart(norm.running_var, reference.moving_variance),
        )
        found["moving"] = max(found["moving"], *moving)
    assert int(net[1].num_batches_tracked) == 2
    return found


def _weighed(outputs, weights):
    return sum((o * w).sum() for o, w in zip(outputs, weights, strict=True))


def _apart(a, b):
    return float((a.detach() - b.detach()).abs().max())


@pytest.mark.parametrize("layout", [PADDED, MOSAIC], ids=["padded", "mosaic"])
def test_batch_norm_of_several_images_has_the_statistics_of_all_their_cells(layout):
    found = differences(layout)
    assert max(found.values()) < 1e-11, found


@pytest.mark.parametrize("broken", ["statistics of the whole canvas", "a plain backward pass"])
def test_control_batch_norm_of_the_canvas_differs(monkeypatch, broken):
    if broken == "a plain backward pass":
        monkeypatch.setattr(ops, "_affine", _without_gradient_of_statistics(ops._affine))
        assert differences(PADDED)["gradients"] > 1e-3
        return
    monkeypatch.setitem(canvas_ops.batch_norm.__globals__, "valid_batch_norm", _of_canvas)
    assert differences(PADDED)["outputs"] > 1e-3


def _of_canvas(x, weight, bias, mask, epsilon, *ranks):
    everything = ops.LevelMask(Canvas(len(x), *x.shape[2:]), [])
    everything.strips, everything.num_valid = [], len(x) * x.shape[2] * x.shape[3]
    return ops.valid_batch_norm(x, weight, bias, everything, epsilon, *ranks)


def _without_gradient_of_statistics(affine):
    calls = iter(range(1000))

    def once(x, *rest):
        made = affine(x, *rest)
        return made if next(calls) % 2 == 0 else made * 0

    return once


def kept_and_peak_bytes(step):
    """The most memory that a step holds at one time."""
    step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def blocks(norm, activation):
    inner = [m for _ in range(4) for m in (nn.Conv2d(8, 8, 3, padding=1), norm(), activation())]
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *inner)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("norm", "activation"),
    [
        (lambda: nn.BatchNorm2d(8), lambda: nn.ReLU(inplace=True)),
        (lambda: nn.BatchNorm2d(8), nn.SiLU),
        (lambda: nn.GroupNorm(2, 8), nn.ReLU),
    ],
    ids=["batch norm, ReLU", "batch norm, SiLU", "group norm"],
)
def test_a_step_takes_no_more_memory_than_an_unmasked_canvas(norm, activation, autocast):
    net = blocks(norm, activation).train()
    model = on_canvas(net)
    layout = Layout(Canvas(2, 96, 96), (Placement(0, 0, 0, 80, 90), Placement(1, 0, 0, 70, 96)))
    pixels = torch.zeros(2, 3, 96, 96)

    def step(forward):
        net.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            y = forward(pixels)
        y.float().square().mean().backward()

    plain = kept_and_peak_bytes(lambda: step(net))
    masked = kept_and_peak_bytes(lambda: step(lambda x: model(x, layout)))
    assert plain > 2e6
    assert masked <= 1.1 * plain
