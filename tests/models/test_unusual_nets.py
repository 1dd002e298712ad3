"""Nets that do unusual things: each is exact on canvases or refused by name."""

import math
import re
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from anysize.errors import UnsupportedNetError
from anysize.geometry import Canvas, Layout, Placement
from anysize.models.on_canvas import on_canvas
from anysize.models.prove import prove

SIZES = [(17, 22), (24, 14), (20, 31)]


class Net(nn.Module):
    """An operation between convolutions whose biases dirty the outside."""

    def __init__(self, operation, channels=4):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.extra = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(channels, 2, 3, padding=1)
        self.operation = operation
        self.inner = operation if isinstance(operation, nn.Module) else None

    def forward(self, x):
        x = F.silu(self.first(x))
        y = self.operation(x) if self.inner is not None else self.operation(self, x)
        return self.last(y)


class DepthwiseAndExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.depthwise = nn.Conv2d(4, 4, 5, padding=2, groups=4)
        self.squeeze, self.excite = nn.Conv2d(4, 2, 1), nn.Conv2d(2, 4, 1)

    def forward(self, x):
        x = self.depthwise(x)
        return x * torch.sigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1)))))


class Double(torch.autograd.Function):
    """Pointwise, with a backward of its own."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


class OwnConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.conv2d(x, weight, padding=1)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (
            nn.grad.conv2d_input(x.shape, weight, grad, padding=1),
            nn.grad.conv2d_weight(x, weight.shape, grad, padding=1),
        )


def attention_by_means(x):
    return torch.sigmoid(x.mean([2, 3], keepdim=True))


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    scripted_attention = torch.jit.script(attention_by_means)
    scripted_convolution = torch.jit.script(nn.Conv2d(4, 4, 3, padding=1))


def pooled_to_two(net, x):
    y = F.adaptive_avg_pool2d(x, (2, 2))
    return x + F.interpolate(y, size=x.shape[2:], mode="nearest")


def shuffled(net, x):
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


def softmax_over_places(net, x):
    n, c, h, w = x.shape
    return x.reshape(n, c, h * w).softmax(-1).reshape(n, c, h, w)


def sampled(net, x):
    grid = F.affine_grid(torch.eye(2, 3).to(x).expand(len(x), 2, 3), x.shape, False)
    return F.grid_sample(x, grid, align_corners=False)


def mean_by_hand(net, x):
    h, w = x.shape[-2:]
    return x * (x.sum((2, 3), keepdim=True) / (h * w))


def odd_gets_a_row(net, x):
    return F.pad(x, (0, x.shape[3] & 1, 0, x.shape[2] & 1))


def coordinates(net, x):
    h, w = x.shape[-2:]
    rows = torch.linspace(0, 1, h, dtype=x.dtype).view(1, 1, h, 1).expand(len(x), 1, h, w)
    return torch.cat([x, rows], 1)[:, 1:]


def kept_on_cpu(net, x):
    with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.clone, lambda kept: kept):
        return net.extra(F.relu(x - 0.1))


def weights_of_the_image(net, x):
    return F.conv2d(x, net.extra.weight * x.mean((2, 3)).mean(0)[:1, None, None, None], padding=1)


def upside_down(net, x):
    y = x.transpose(2, 3)
    n, c, w, h = y.shape
    return y.reshape(n, 2, 2 * w, h).reshape(n, c, w, h).transpose(2, 3)


def data_of_another(net, x):
    y = F.max_pool2d(F.relu(x), 3, 1, 1)
    y.data = x
    return net.extra(y)


def pairs_of_channels(net, x):
    return net.extra(x[:, torch.tensor([[0, 1], [2, 3]])].flatten(1, 2))


def norm_by_variance(net, x):
    return net.extra(x / (x.var(1, False, True) + 1))


EXACT = {
    "depthwise and excite": DepthwiseAndExcite(),
    "group norm": nn.GroupNorm(2, 4),
    "upsampling, corners aligned": nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True),
    "pooled to 2 by 2": pooled_to_two,
    "pooling, ceil mode": nn.MaxPool2d(3, 2, ceil_mode=True),
    "transposed, output padding": nn.ConvTranspose2d(4, 4, 3, 2, 1, output_padding=1),
    "channel shuffle": shuffled,
    "sum over height and width": mean_by_hand,
    "scaled by the extent": lambda _, x: x * (x.shape[-1] / 16),
    "a row for odd extents": odd_gets_a_row,
    "half by shifting": lambda _, x: F.interpolate(x, size=(x.shape[2] >> 1, x.shape[3] >> 1)),
    "channels reversed": lambda _, x: x.flip(1),
    "pointwise function of autograd": lambda net, x: net.extra(Double.apply(x)),
    "activations kept elsewhere": kept_on_cpu,
    "height and width exchanged": lambda net, x: net.extra(
        x.transpose(2, 3).tanh().transpose(2, 3)
    ),
    "a number computed from an extent": lambda _, x: x * math.floor(x.shape[2]) ** 0.5,
    "one slope per channel": nn.PReLU(4),
    "variance of channels": norm_by_variance,
    "running statistics only": nn.BatchNorm2d(4),
}
"""What must be exact."""

REFUSED = {
    "unfold": (lambda _, x: F.fold(F.unfold(x, 1), x.shape[2:], 1), "unfold"),
    "attention": (
        lambda _, x: F.scaled_dot_product_attention(x.mT, x.mT, x.mT).mT,
        "get mT",
    ),
    "softmax over places": (softmax_over_places, "reshape"),
    "roll": (lambda _, x: x.roll(1, 2), "roll"),
    "mirrored": (lambda _, x: x.flip(1, 3), "flip"),
    "mirrored, by name": (lambda _, x: x.flip(dims=(2, 3)), "flip"),
    "sum of rows so far": (lambda _, x: x.cumsum(2), "cumsum"),
    "sampling at a grid": (sampled, "affine_grid|grid_sample"),
    "einsum": (lambda _, x: torch.einsum("nchw,nchv->ncwv", x, x), "einsum"),
    "einsum of weights": (
        lambda net, x: torch.einsum("oc,nchw->nohw", net.extra.weight[:, :, 0, 0], x),
        "einsum",
    ),
    "coordinates": (coordinates, "linspace"),
    "cells of other rows": (upside_down, "reshape"),
    "an extent as a tensor": (lambda _, x: x * torch.tensor(x.shape[2]), "tensor"),
    "an extent's root": (lambda _, x: x * math.sqrt(x.shape[2]), "float"),
    "checkpointing": (
        lambda net, x: checkpoint(net.extra, x, use_reentrant=False),
        "checkpoint",
    ),
    "checkpointing, reentrant": (
        lambda net, x: checkpoint(net.extra, x, use_reentrant=True),
        "checkpoint",
    ),
    "a convolution with a backward of its own": (
        lambda net, x: OwnConvolution.apply(x, net.extra.weight),
        "OwnConvolution",
    ),
    "a scripted function": (lambda net, x: net.extra(x * scripted_attention(x)), None),
    "a scripted module": (scripted_convolution, None),
    "weights made of the image": (weights_of_the_image, None),
    "channels picked in pairs": (pairs_of_channels, "__getitem__"),
    "statistics of the batch in evaluation": (
        nn.BatchNorm2d(4, track_running_stats=False),
        "batch_norm",
    ),
    "smallest value": (lambda _, x: x * x.norm(-math.inf, (2, 3), keepdim=True), "norm"),
    "bicubic": (nn.Upsample(scale_factor=2, mode="bicubic"), "interpolate"),
    "local response norm": (nn.LocalResponseNorm(2), "local_response_norm"),
    "data of another": (data_of_another, "set data"),
}
"""What must be refused, and what the message says."""


@pytest.mark.parametrize("name", EXACT)
def test_exact(name):
    proof = prove(Net(EXACT[name]), SIZES)
    assert proof.exact, proof.summary


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a dry run's
@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    operation, says = REFUSED[name]
    net = Net(operation).eval()
    layout = Layout(Canvas(2, 32, 32), (Placement(0, 0, 0, 17, 22), Placement(1, 0, 0, 24, 14)))
    with pytest.raises(UnsupportedNetError, match=says) as refused:
        on_canvas(net)(torch.zeros(2, 3, 32, 32), layout)
    if name not in ("a scripted module", "an extent's root"):  # no operation of the net was run
        assert re.match(r"[\w.]+ \(\w+\): `[\w ]+` of \[.*\]: .", str(refused.value))


def test_what_cannot_be_seen_is_found_by_the_proof():
    """`math.log` of a whole number asks nothing of the number."""
    proof = prove(Net(lambda _, x: x * math.log(x.shape[2])), SIZES)
    assert not proof.exact
    assert "first in last" in proof.summary
