import pytest
import torch
import torch.nn.functional as F

from anysize.geometry import Canvas
from anysize.models import ops
from anysize.models.ops import ConvNorm, LevelMask


@pytest.mark.parametrize(("num_in", "num_out", "safe"), [(4, 16, 0), (16, 8, 0), (32, 16, 1)])
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("bf16", [False, True])
def test_1x1_convolutions_of_few_channels_are_matrix_products(
    monkeypatch, num_in, num_out, safe, stride, bf16
):
    """Their backward pass corrupts the heap in oneDNN, so it must not be called at all."""
    generator = torch.Generator().manual_seed(0)
    conv = ConvNorm(
        num_in, num_out, 1, stride=stride, norm="frozen", norm_decay=0.9, generator=generator
    )
    x = torch.randn(2, num_in, 9, 7, generator=generator).requires_grad_()
    mask = LevelMask(Canvas(2, 9, 7), [])
    expected = F.conv2d(x.double(), conv.weights.double(), stride=stride)
    calls = []
    real = F.conv2d
    monkeypatch.setattr(ops.F, "conv2d", lambda *a: calls.append(1) or real(*a))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
        y = conv(x, mask)
    assert len(calls) == safe
    assert y.dtype == (torch.bfloat16 if bf16 else torch.float32)
    tolerance = 2e-2 if bf16 else 1e-4
    torch.testing.assert_close(y.double(), expected, rtol=tolerance, atol=tolerance)
    y.float().sum().backward()
    assert x.grad.shape == x.shape
