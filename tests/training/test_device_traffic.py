"""What a step asks of a device: nothing mixed, one wait, no copies but of its batch.

The device "meta" stands for a GPU: it computes nothing, and PyTorch takes it for one of its own.
"""

import dataclasses
import importlib
from collections import Counter

import pytest
import torch
from tests.models.small_nets import SmallUnet
from tests.training.test_state import tiny
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from anysize.config import ModelConfig, OptimConfig
from anysize.data.batch import Batch
from anysize.geometry import Canvas, Layout, Placement, target_canvas
from anysize.models.any_net import AnyNet
from anysize.models.on_canvas import geometry_of_net
from anysize.models.ops import LevelMask
from anysize.training.losses import CrossEntropy, Dice, SigmoidCrossEntropy
from anysize.training.optim import build_optimizer
from anysize.training.step import train_step

WAITS = {"aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero", "aten::equal"}
COPIES = {"aten::_to_copy", "aten::copy_"}
SOFTMAX = CrossEntropy(class_weights=(1.0, 2.0))


def tensors(values):
    return [t for t in tree_leaves(values) if isinstance(t, torch.Tensor)]


class Uploads(TorchFunctionMode):
    """Counts tensors that are made on the device from Python's numbers."""

    def __init__(self, seen):
        super().__init__()
        self.seen = seen

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = getattr(func, "__name__", "") in ("tensor", "as_tensor", "new_tensor")
        self.seen["copies"] += made and result.device.type == "meta"
        return result


class Traffic(TorchDispatchMode):
    """Counts what crosses between device and host, and operations on both."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name, kwargs = func.name().partition(".")[0], kwargs or {}
        on = {t.device.type for t in tensors((args, kwargs))}
        if "meta" not in on and "meta" not in str(kwargs.get("device")):
            return func(*args, **kwargs)
        to_host = name == "aten::_to_copy" and str(kwargs.get("device")) == "cpu"
        if name in WAITS or to_host:
            self.seen["waits"] += 1
            return torch.ones(args[0].shape) if to_host else 1.0
        if name in COPIES:
            self.seen["copies"] += "cpu" in on
        else:
            self.seen["mixed"] += len(on) > 1
        self.seen["operators"] += 1
        if name.startswith("aten::_fused_"):  # The optimiser's, without a kernel for "meta".
            return None
        if name == "aten::batch_norm_update_stats":  # Likewise.
            return tuple(args[0].new_empty(args[0].shape[1]) for _ in range(2))
        return func(*args, **kwargs)


@pytest.fixture(autouse=True)
def fused_optimisers_anywhere(monkeypatch):
    for name in ("adam", "sgd"):
        module = importlib.import_module(f"torch.optim.{name}")
        monkeypatch.setattr(module, "_device_dtype_check_for_fused", lambda *_, **__: None)


def net_of(kind):
    if kind == "of one's own":
        net = SmallUnet(2, width=16)
        return AnyNet(net, geometry_of_net(net), norms_frozen=True)
    return tiny(config=ModelConfig(units=(1, 1, 1, 1), base_depth=16, norm=kind))


def batch_of(net, loss):
    places = (Placement(0, 0, 0, 40, 64), Placement(1, 0, 0, 64, 32))
    layout = Layout(Canvas(2, 64, 96), places)
    shape = tuple(target_canvas(layout.canvas, net.geometry, "grid"))
    if isinstance(loss, SigmoidCrossEntropy):
        shape = (shape[0], 2, *shape[1:])
    return Batch(
        pixels=torch.zeros(2, 3, 64, 96),
        target=torch.zeros(shape, dtype=torch.uint8),
        layout=layout,
        stems=("a", "b"),
        geometry=net.geometry,
        loss_at="grid",
    )


def traffic_of_a_step(kind, loss, optimiser="adamw"):
    """Of the second step of two, of two batches each."""
    net = net_of(kind).to("meta").train()
    optimizer = build_optimizer(net, OptimConfig(kind=optimiser))
    batches = [batch_of(net, loss)] * 2
    for _ in range(2):
        traffic = Traffic()
        with traffic, Uploads(traffic.seen):
            result = train_step(net, loss, batches, optimizer)
    assert result.loss.device.type == "cpu"
    return traffic.seen


@pytest.mark.parametrize(
    ("kind", "loss", "operators"),
    [
        ("frozen", SOFTMAX, 1077),
        ("frozen", SigmoidCrossEntropy(class_weights=(1.0, 2.0)), 1087),
        ("frozen", Dice(labels="multiclass"), 1285),
        ("trained", SOFTMAX, 2471),
        ("of one's own", SOFTMAX, 315),
    ],
    ids=str,
)
def test_a_step_waits_once_mixes_nothing_and_copies_its_batches(kind, loss, operators):
    seen = traffic_of_a_step(kind, loss)
    assert seen["waits"] == 1
    assert seen["mixed"] == 0
    # Pixels and target, and the masks of all levels, which a net of one's own keeps.
    assert seen["copies"] == (6 if kind == "of one's own" else 12)
    assert seen["operators"] <= operators


def test_both_optimisers_wait_for_nothing():
    assert traffic_of_a_step("frozen", SOFTMAX, "sgd")["waits"] == 1


class Careless(CrossEntropy):
    def sum(self, logits, batch):
        total = super().sum(logits, batch)
        weights = torch.tensor([1.0, 2.0]) if self.ignore_index else logits.new_tensor([1.0, 2.0])
        scale = torch.tensor(2.0)  # a number on the host
        if float(total.detach()) > 0:
            total = total * scale
        return total + 0 * weights.to(total.device).sum()


def test_control_a_careless_loss_is_seen():
    seen = traffic_of_a_step("frozen", Careless())
    assert seen["waits"] == 3
    assert seen["mixed"] >= 2
    assert seen["copies"] > 12


@pytest.mark.parametrize("kind", ["frozen", "trained", "of one's own"])
def test_masks_in_one_operation_compute_what_strips_compute(kind, monkeypatch):
    def learned():
        torch.manual_seed(0)  # noqa: TID251  # nets of one's own draw from it
        net = net_of(kind).double().train()
        batch = batch_of(net, SOFTMAX)
        for p in batch.layout.placements:
            batch.pixels[p.slot, :, : p.height, : p.width].normal_()
        batch = dataclasses.replace(batch, pixels=batch.pixels.double())
        train_step(net, SOFTMAX, [batch], torch.optim.SGD(net.parameters(), lr=0.1))
        return net.state_dict()

    expected = learned()
    used = Counter()
    at_once = LevelMask._fill

    def counted(*args):
        used["fills"] += 1
        return at_once(*args)

    monkeypatch.setattr(LevelMask, "_fill_strips", counted)
    found = learned()
    assert used["fills"] > 3
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
