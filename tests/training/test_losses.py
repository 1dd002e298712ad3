import math

import pytest
import torch

from anysize.training.losses import loss_sum


def test_softmax_by_hand():
    logits = torch.tensor([[[[0.0, math.log(3.0), 9.0]], [[0.0, 0.0, 1.0]]]])
    target = torch.tensor([[[0, 1, 255]]])
    # Pixel 0: log 2. Pixel 1: class 1 has probability 1/4. Pixel 2 is ignored.
    found = loss_sum("softmax", logits, target, ignore_index=255)
    assert float(found) == pytest.approx(math.log(2) + math.log(4))


def test_softmax_class_weights_scale_pixels_and_not_the_count():
    logits = torch.zeros(1, 2, 1, 2)
    target = torch.tensor([[[0, 1]]])
    weights = torch.tensor([3.0, 0.5])
    found = loss_sum("softmax", logits, target, ignore_index=255, class_weights=weights)
    assert float(found) == pytest.approx(3.5 * math.log(2))


def test_sigmoid_by_hand_with_ignored_entries():
    logits = torch.tensor([[[[math.log(3.0), 5.0]], [[-math.log(3.0), 0.0]]]])
    target = torch.tensor([[[[1, 255]], [[1, 0]]]], dtype=torch.uint8)
    # 3/4 present: log 4/3. Ignored. 1/4 present: log 4. 1/2 absent: log 2.
    found = loss_sum("sigmoid", logits, target, ignore_index=255)
    assert float(found) == pytest.approx(math.log(4 / 3) + math.log(4) + math.log(2))


def test_sigmoid_class_weights():
    logits = torch.zeros(1, 2, 1, 1)
    target = torch.tensor([[[[1]], [[0]]]], dtype=torch.uint8)
    weights = torch.tensor([3.0, 0.5])
    found = loss_sum("sigmoid", logits, target, ignore_index=255, class_weights=weights)
    assert float(found) == pytest.approx(3.5 * math.log(2))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_nothing_valid_is_zero_with_a_zero_gradient(kind):
    logits = torch.randn(1, 2, 3, 3, requires_grad=True)
    shape = (1, 3, 3) if kind == "softmax" else (1, 2, 3, 3)
    target = torch.full(shape, 255, dtype=torch.int64 if kind == "softmax" else torch.uint8)
    loss = loss_sum(kind, logits, target, ignore_index=255)
    loss.backward()
    assert float(loss.detach()) == 0
    assert float(logits.grad.abs().max()) == 0


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    target = torch.zeros(1, 64, 64, dtype=torch.int64)
    found = loss_sum("softmax", logits, target, ignore_index=255)
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(4096 * math.log(2), rel=1e-5)
