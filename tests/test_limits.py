"""What a device can do, and what a net asks of it."""

import torch
import torch.nn.functional as F

from anysize.limits import convolution_flops_s, count_flops


def test_a_convolution_reaches_something_even_without_time():
    rate = convolution_flops_s(16, precision="float32", device=torch.device("cpu"), seconds=0.0)
    assert 1e6 < rate < 1e15


def test_operations_of_a_convolution_are_counted_forwards_and_backwards():
    x = torch.zeros(2, 3, 10, 12)
    weights = torch.zeros(5, 3, 3, 3, requires_grad=True)
    forward = 2 * 9 * 3 * 5 * 2 * 10 * 12
    assert count_flops(lambda: F.conv2d(x, weights, padding=1)) == forward
    # The pixels need no gradient.
    assert count_flops(lambda: F.conv2d(x, weights, padding=1).sum().backward()) == 2 * forward
