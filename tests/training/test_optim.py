import pytest
import torch

from anysize.config import ModelConfig, OptimConfig
from anysize.models.build import build_model
from anysize.training.optim import build_optimizer, learning_rate, set_learning_rate


def test_sgd_is_tensorflows_momentum():
    """v = mu * v + g; w -= lr * v, by hand over three steps, with the rate changed on the way."""
    w = torch.nn.Parameter(torch.tensor([1.0]))
    model = torch.nn.Module()
    model.biases = w
    optimizer = build_optimizer(model, OptimConfig(lr=0.1, momentum=0.5, weight_decay=0.3))
    expected, v = 1.0, 0.0
    for rate, g in ((0.1, 2.0), (0.1, -1.0), (0.01, 4.0)):
        set_learning_rate(optimizer, rate)
        w.grad = torch.tensor([g])
        optimizer.step()
        v = 0.5 * v + g
        expected -= rate * v
        assert float(w.detach()) == pytest.approx(expected)


def test_decay_is_on_convolution_weights_only():
    model = build_model(ModelConfig(units=(1, 1, 1, 1), base_depth=4), 2)
    optimizer = build_optimizer(model, OptimConfig(lr=1.0, momentum=0.0, weight_decay=0.25))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    for name, p in model.named_parameters():
        factor = 0.75 if name.endswith("weights") else 1.0
        torch.testing.assert_close(p.detach(), before[name] * factor)


@pytest.mark.parametrize(
    ("settings", "step", "expected"),
    [
        ({}, 99, 1.0),
        ({"schedule": "multistep", "milestones": (10, 20)}, 9, 1.0),
        ({"schedule": "multistep", "milestones": (10, 20)}, 10, 0.1),
        ({"schedule": "multistep", "milestones": (10, 20), "gamma": 0.5}, 25, 0.25),
        ({"schedule": "poly", "power": 2.0}, 0, 1.0),
        ({"schedule": "poly", "power": 2.0}, 50, 0.25),
        ({"warmup_steps": 3}, 0, 0.25),
        ({"warmup_steps": 3}, 2, 0.75),
        ({"warmup_steps": 3}, 3, 1.0),
        ({"schedule": "poly", "power": 1.0, "warmup_steps": 1}, 0, 0.5),
    ],
)
def test_schedules(settings, step, expected):
    assert learning_rate(OptimConfig(lr=1.0, **settings), step, 100) == pytest.approx(expected)
