import pytest
import torch
import torch.nn.functional as F

from anysize.geometry import Canvas
from anysize.models.ops import ConvNorm, LevelMask


@pytest.mark.parametrize(("num_in", "num_out"), [(4, 16), (16, 8), (24, 16)])
def test_bf16_1x1_convolutions_of_few_channels_run_in_float32(num_in, num_out):
    """In bf16 their backward pass corrupts the heap, so the result must be float32's, rounded."""
    generator = torch.Generator().manual_seed(0)
    conv = ConvNorm(num_in, num_out, 1, norm="frozen", norm_decay=0.9, generator=generator)
    x = torch.randn(1, num_in, 9, 9, generator=generator).bfloat16().requires_grad_()
    mask = LevelMask(Canvas(1, 9, 9), [])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = conv(x, mask)
    scale = 1 / (1 + ConvNorm.EPSILON) ** 0.5
    expected = F.conv2d(x.float(), conv.weights * scale, conv.beta).bfloat16()
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.float().sum().backward()
    assert x.grad.dtype == torch.bfloat16


def test_other_convolutions_run_in_bf16():
    generator = torch.Generator().manual_seed(0)
    conv = ConvNorm(32, 16, 1, norm="frozen", norm_decay=0.9, generator=generator)
    x = torch.randn(1, 32, 9, 9, generator=generator)
    mask = LevelMask(Canvas(1, 9, 9), [])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = conv(x, mask)
    assert not torch.equal(y, F.conv2d(x, conv.weights, conv.beta).bfloat16())
