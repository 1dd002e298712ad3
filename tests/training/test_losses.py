"""Every loss by hand, and the promise of them all: however images are shared out, the same step."""

import dataclasses
import math
import typing
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from anysize.config import LABELS_OF, LossConfig, LossKind, ModelConfig, OptimConfig
from anysize.data.batch import Batch, cut_out
from anysize.data.joints import LOCATION_STDEV, joint_targets, num_logits
from anysize.data.splitting import split_to_fit
from anysize.geometry import (
    Canvas,
    Layout,
    NetGeometry,
    Size,
    check_layout,
    grid_centres,
    padded_batch,
    place,
    single,
    target_canvas,
    target_rect,
)
from anysize.models.build import build_model
from anysize.training.losses import CrossEntropy, Dice, PoseLoss, SigmoidCrossEntropy, build_loss
from anysize.training.optim import build_optimizer
from anysize.training.step import train_step

GEOMETRY = NetGeometry(16)
SIZES = [Size(33, 47), Size(70, 21), Size(16, 16), Size(51, 64), Size(25, 90)]
NUM_CLASSES = 3
IGNORE = 254


def whole(target, num_classes=2):
    """A batch of one image that is its canvas."""
    height, width = target.shape[-2:]
    return Batch(
        pixels=torch.zeros(1, 3, height, width),
        target=target.to(torch.uint8),
        layout=single(Size(height, width), GEOMETRY),
        stems=("a",),
        geometry=GEOMETRY,
        loss_at="full",
    )


def test_cross_entropy_by_hand():
    logits = torch.tensor([[[[0.0, math.log(3.0), 9.0]], [[0.0, 0.0, 1.0]]]])
    batch = whole(torch.tensor([[[0, 1, 255]]]))
    # Pixel 0: log 2. Pixel 1: class 1 has probability 1/4. Pixel 2 is ignored.
    assert float(CrossEntropy().sum(logits, batch)) == pytest.approx(math.log(2) + math.log(4))
    assert CrossEntropy().count(batch) == 2


def test_class_weights_scale_pixels_and_not_the_count():
    batch = whole(torch.tensor([[[0, 1]]]))
    loss = CrossEntropy(class_weights=(3.0, 0.5))
    assert float(loss.sum(torch.zeros(1, 2, 1, 2), batch)) == pytest.approx(3.5 * math.log(2))
    assert loss.count(batch) == 2


def test_sigmoid_cross_entropy_by_hand_with_ignored_entries():
    logits = torch.tensor([[[[math.log(3.0), 5.0]], [[-math.log(3.0), 0.0]]]])
    batch = whole(torch.tensor([[[[1, 255]], [[1, 0]]]]))
    # 3/4 present: log 4/3. Ignored. 1/4 present: log 4. 1/2 absent: log 2.
    expected = math.log(4 / 3) + math.log(4) + math.log(2)
    assert float(SigmoidCrossEntropy().sum(logits, batch)) == pytest.approx(expected)
    assert SigmoidCrossEntropy().count(batch) == 3


def test_class_weights_of_several_labels():
    batch = whole(torch.tensor([[[[1]], [[0]]]]))
    loss = SigmoidCrossEntropy(class_weights=(3.0, 0.5))
    assert float(loss.sum(torch.zeros(1, 2, 1, 1), batch)) == pytest.approx(3.5 * math.log(2))


def test_focal_by_hand():
    logits = torch.tensor([[[[0.0, math.log(3.0), 9.0]], [[0.0, 0.0, 1.0]]]])
    batch = whole(torch.tensor([[[0, 1, 255]]]))
    # True classes have probabilities 1/2 and 1/4, weights 3 and 0.5; the third is ignored.
    expected = 3 * 0.5**2 * math.log(2) + 0.5 * 0.75**2 * math.log(4)
    found = CrossEntropy(focal_gamma=2.0, class_weights=(3.0, 0.5)).sum(logits, batch)
    assert float(found) == pytest.approx(expected)


def test_focal_of_several_labels_by_hand():
    logits = torch.tensor([[[[math.log(3.0), 5.0]], [[-math.log(3.0), 0.0]]]])
    batch = whole(torch.tensor([[[[1, 255]], [[1, 0]]]]))
    # True answers have 3/4 (class 0), 1/4 and 1/2 (class 1).
    expected = 3 * 0.25 * math.log(4 / 3) + 0.5 * (0.75 * math.log(4) + 0.5 * math.log(2))
    found = SigmoidCrossEntropy(focal_gamma=1.0, class_weights=(3.0, 0.5)).sum(logits, batch)
    assert float(found) == pytest.approx(expected)


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_focal_has_a_finite_gradient_where_a_pixel_is_right_for_certain(gamma):
    logits = torch.tensor([[[[200.0]], [[-200.0]]]], requires_grad=True)
    CrossEntropy(focal_gamma=gamma).sum(logits, whole(torch.tensor([[[0]]]))).backward()
    assert torch.isfinite(logits.grad).all()


def test_dice_by_hand():
    # Class 0 has probability 3/4 at both pixels that count; the third is ignored.
    logits = torch.tensor([[[[math.log(3.0), math.log(3.0), 7.0]], [[0.0, 0.0, 0.0]]]])
    batch = whole(torch.tensor([[[0, 1, 255]]]))
    first = (2 * 0.75 + 1) / (1.5 + 1 + 1)
    second = (2 * 0.25 + 1) / (0.5 + 1 + 1)
    loss = Dice(labels="multiclass", class_weights=(3.0, 0.5))
    expected = 2 * (3 * (1 - first) + 0.5 * (1 - second)) / 2
    assert float(loss.sum(logits, batch)) == pytest.approx(expected)
    assert loss.count(batch) == 2


def test_dice_of_several_labels_by_hand():
    logits = torch.tensor([[[[math.log(3.0), 5.0]], [[-math.log(3.0), 0.0]]]])
    batch = whole(torch.tensor([[[[1, 255]], [[1, 0]]]]))
    first = (2 * 0.75 + 1) / (0.75 + 1 + 1)
    second = (2 * 0.25 + 1) / (0.75 + 1 + 1)
    loss = Dice(labels="multilabel")
    assert float(loss.sum(logits, batch)) == pytest.approx(3 * (2 - first - second) / 2)
    assert loss.count(batch) == 3


def test_dice_is_that_of_each_image_and_not_of_the_canvas():
    logits = torch.tensor([[[[3.0, -3.0]], [[0.0, 0.0]]]])
    target = torch.tensor([[[0, 1]]])
    apart = [
        whole(target[..., :1]),
        whole(target[..., 1:]),
    ]
    loss = Dice(labels="multiclass")
    alone = sum(loss.sum(logits[..., i : i + 1], batch) for i, batch in enumerate(apart))
    assert float(alone) != pytest.approx(float(loss.sum(logits, whole(target))), rel=1e-3)


def test_shares_of_dice_and_of_the_rest():
    logits = torch.randn(1, 2, 3, 3, generator=torch.Generator().manual_seed(1))
    batch = whole(torch.randint(2, (1, 3, 3), generator=torch.Generator().manual_seed(2)))
    mixed = build_loss(LossConfig(dice_share=0.25, focal_gamma=2.0), 255)
    rest, dice = CrossEntropy(focal_gamma=2.0), Dice(labels="multiclass")
    expected = 0.75 * rest.sum(logits, batch) + 0.25 * dice.sum(logits, batch)
    assert float(mixed.sum(logits, batch)) == pytest.approx(float(expected))
    assert mixed.count(batch) == 9


def test_the_settings_of_loss_reach_it():
    config = LossConfig(kind="softmax", class_weights=(1.0, 2.0))
    assert build_loss(config, 7) == CrossEntropy(ignore_index=7, class_weights=(1.0, 2.0))
    config = dataclasses.replace(config, kind="sigmoid")
    assert build_loss(config, 7) == SigmoidCrossEntropy(ignore_index=7, class_weights=(1.0, 2.0))
    config = dataclasses.replace(config, kind="pose", location_weight=0.5)
    assert build_loss(config, 7, "gaussians") == PoseLoss(
        ignore_index=7, class_weights=(1.0, 2.0), part_maps="gaussians", location_weight=0.5
    )


def pose_batch(targets, size):
    layout = single(Size(*size), GEOMETRY)
    return dataclasses.replace(
        whole(torch.zeros(*size)), target=targets[None], layout=layout, loss_at="cells"
    )


def test_the_loss_of_joints_by_hand():
    # Joint 0 is at (10, 10): 9 of 16 cells are positive. Joint 1 is not labelled.
    wanted = targets([[(10, 10), (np.nan, np.nan)]], (32, 32))
    batch = pose_batch(wanted, (32, 32))
    logits = torch.zeros(1, 8, 4, 4, dtype=torch.float64)
    logits[:, :2], logits[:, 6:] = math.log(3), -math.log(3)  # Probabilities 3/4 and 1/4.
    logits[0, 3, 0, 0] = 3.0
    maps = (9 * math.log(4 / 3) + 23 * math.log(4)) / 32
    middle = (9 * math.log(4) + 23 * math.log(4 / 3)) / 32
    ways = [(10 - c) / LOCATION_STDEV for c in (4, 12, 20)]
    huber = sum(d * d / 2 if abs(d) < 1 else abs(d) - 0.5 for d in ways) * 6
    first = ways[0]
    huber += 3.0 - first - 0.5 - first**2 / 2  # The cell that says 3.0 in y.
    expected = maps + middle + 0.05 * huber / 18
    assert float(PoseLoss(ignore_index=IGNORE).sum(logits, batch)) == pytest.approx(expected, 1e-6)
    assert PoseLoss(ignore_index=IGNORE).count(batch) == 1


def test_the_loss_of_gaussian_maps_is_the_squared_error():
    wanted = targets([[(10, 10)]], (32, 32), maps="gaussians")
    loss = PoseLoss(ignore_index=IGNORE, part_maps="gaussians", location_weight=0.0)
    found = loss.sum(torch.zeros(1, 3, 4, 4), pose_batch(wanted, (32, 32)))
    centres = 8 * np.arange(4) + 4
    squared = (centres[:, None] - 10.0) ** 2 + (centres - 10.0) ** 2
    stdev = 2 * 17 / 3
    assert float(found) == pytest.approx(np.exp(-squared / stdev**2).mean(), 1e-6)


def test_half_precision_logits_are_summed_in_float32():
    logits = torch.zeros(1, 2, 64, 64, dtype=torch.bfloat16)
    found = CrossEntropy().sum(logits, whole(torch.zeros(1, 64, 64)))
    assert found.dtype == torch.float32
    assert float(found) == pytest.approx(4096 * math.log(2), rel=1e-5)


# The promise, held for every loss that `loss.kind` names.


def images_and_labels(labels):
    """Random images and full-resolution masks of `SIZES`, a tenth of them ignored; or joints."""
    generator = torch.Generator().manual_seed(5)
    found = []
    for size in SIZES:
        pixels = torch.randn(3, *size, generator=generator, dtype=torch.float64)
        if labels == "joints":
            joints = np.random.default_rng(size).uniform(0, size[::-1], (2, NUM_CLASSES, 2))
            joints[1, :2] = np.nan
            found.append((pixels, targets(joints, size)))
            continue
        shape = (NUM_CLASSES, *size) if labels == "multilabel" else tuple(size)
        top = 2 if labels == "multilabel" else NUM_CLASSES
        mask = torch.randint(0, top, shape, generator=generator).to(torch.uint8)
        mask[torch.rand(shape, generator=generator) < 0.1] = IGNORE
        found.append((pixels, mask))
    return found


def targets(joints, size, maps="discs", radius=17.0):
    """What a net is to give for the joints of an image."""
    found = joint_targets(
        np.array(joints, float),
        Size(*size),
        GEOMETRY,
        maps=maps,
        radius=radius,
        ignore_index=IGNORE,
    )
    return torch.from_numpy(found)


def on_canvas(layout, images, labels, loss_at):
    """A batch of some of the images."""
    canvas = target_canvas(layout.canvas, GEOMETRY, loss_at)
    shape = (canvas.slots,) if labels == "multiclass" else (canvas.slots, NUM_CLASSES)
    if labels == "joints":
        shape = (canvas.slots, 3 * NUM_CLASSES)
    batch = Batch(
        pixels=torch.zeros(layout.canvas.slots, 3, *layout.canvas[1:], dtype=torch.float64),
        target=torch.full((*shape, *canvas[1:]), IGNORE, dtype=images[0][1].dtype),
        layout=layout,
        stems=tuple(str(i) for i in range(len(images))),
        geometry=GEOMETRY,
        loss_at=loss_at,
    )
    for p, (pixels, mask) in zip(layout.placements, images, strict=True):
        batch.pixels[p.slot, :, p.top : p.top + p.height, p.left : p.left + p.width] = pixels
        if loss_at == "grid":
            mask = mask[..., grid_centres(p.height, GEOMETRY), :]
            mask = mask[..., grid_centres(p.width, GEOMETRY)]
        cut_out(batch.target, target_rect(p, GEOMETRY, loss_at)).copy_(mask)
    return batch


def mosaic():
    """All images in one slot, one beside the other, a gutter apart."""
    placements, cell = [], 0
    for size in SIZES:
        placements.append(place(size, GEOMETRY, slot=0, cell_top=0, cell_left=cell))
        cell += GEOMETRY.cells(size.width) + GEOMETRY.gutter_cells
    layout = Layout(Canvas(1, 88, 16 * cell), tuple(placements))
    check_layout(layout, GEOMETRY)
    return layout


def packings(labels, loss_at):
    """The same step in all ways of sharing it out."""
    images = images_and_labels(labels)
    alone = [
        on_canvas(single(size, GEOMETRY), [image], labels, loss_at)
        for size, image in zip(SIZES, images, strict=True)
    ]
    padded = on_canvas(padded_batch(SIZES, Canvas(5, 104, 104), GEOMETRY), images, labels, loss_at)
    together = on_canvas(mosaic(), images, labels, loss_at)
    return {
        "alone": alone,
        "padded": [padded],
        "mosaic": [together],
        "accumulated": [
            on_canvas(
                padded_batch(SIZES[:2], Canvas(2, 76, 60), GEOMETRY), images[:2], labels, loss_at
            ),
            on_canvas(
                padded_batch(SIZES[2:], Canvas(4, 72, 96), GEOMETRY), images[2:], labels, loss_at
            ),
        ],
        "slots split by memory": split_to_fit([padded], 2 * 104 * 104, IGNORE),
        "images split by memory": split_to_fit([together], 1, IGNORE),
    }


def outcome(loss, batches, loss_at, ranks=1):
    """Loss and gradients of a step as one vector, and whether it is a proper step.

    Several ranks each take some of the batches; their gradients and losses are added up.
    """
    settings, labels = {"loss_at": loss_at}, "multiclass"
    if loss_at == "cells":
        settings, labels = {"intermediate": True, "units": (1, 1, 12, 1)}, "joints"
    count = sum(loss.count(batch) for batch in batches)
    assert count > 0
    added = 0.0
    for rank in range(ranks):
        generator = torch.Generator().manual_seed(0)
        config = ModelConfig(**{"units": (1, 1, 1, 1), "base_depth": 4} | settings)
        num_out = num_logits(labels, NUM_CLASSES)
        net = build_model(config, num_out, generator=generator).double().train()
        before = torch.cat([p.detach().flatten().clone() for p in net.parameters()])
        optimizer = build_optimizer(net, OptimConfig(lr=1.0, momentum=0.0, weight_decay=0.0))
        result = train_step(net, loss, batches[rank::ranks], optimizer, count=count)
        after = torch.cat([p.detach().flatten() for p in net.parameters()])
        assert not result.skipped
        added = added + torch.cat([result.loss.reshape(1).double(), before - after])
    return added


def relative(ours, theirs):
    return float((ours - theirs).abs().max() / theirs.abs().max())


def worst(make_loss, labels, loss_at):
    """The largest relative difference of a packing's step from that of each image alone."""
    packed = packings(labels, loss_at)
    expected = outcome(make_loss(), packed["alone"], loss_at)
    assert float(expected[1:].abs().max()) > 1e-3, "no gradient: nothing would be proven"
    found = {
        name: relative(outcome(make_loss(), batches, loss_at), expected)
        for name, batches in packed.items()
    }
    found["two ranks"] = relative(outcome(make_loss(), packed["alone"], loss_at, 2), expected)
    assert {len(packed["slots split by memory"]), len(packed["images split by memory"])} == {3, 5}
    return found


WEIGHTS = (0.5, 2.0, 3.0)
SETTINGS = {
    "equal": {},
    "weighted": {"class_weights": WEIGHTS},
    "focal": {"class_weights": WEIGHTS, "focal_gamma": 2.0},
    "dice": {"class_weights": WEIGHTS, "dice_share": 1.0},
    "focal with dice": {"focal_gamma": 0.5, "dice_share": 0.4},
}
EVERY_LOSS = [
    pytest.param(kind, settings, id=f"{kind}, {name}")
    for kind in typing.get_args(LossKind)
    for name, settings in SETTINGS.items()
    if kind != "pose" or name in {"equal", "weighted"}
]


@pytest.mark.parametrize(("kind", "settings"), EVERY_LOSS)
def test_a_loss_does_not_depend_on_how_images_are_shared_out(kind, settings):
    config = LossConfig(kind=kind, **settings)
    for loss_at in ("cells",) if kind == "pose" else ("grid", "full"):
        found = worst(lambda: build_loss(config, IGNORE), LABELS_OF[kind], loss_at)
        assert max(found.values()) < 1e-12, found


@pytest.mark.parametrize(("kind", "settings"), EVERY_LOSS)
def test_nothing_valid_is_zero_with_a_zero_gradient(kind, settings):
    shape = {"softmax": (1, 3, 3), "sigmoid": (1, 2, 3, 3), "pose": (1, 6, 3, 3)}[kind]
    logits = torch.randn(1, 6 if kind == "pose" else 2, 3, 3, requires_grad=True)
    batch = whole(torch.full(shape, 255))
    settings = {**settings, "class_weights": settings.get("class_weights", ())[:2]}
    loss = build_loss(LossConfig(kind=kind, **settings), 255)
    total = loss.sum(logits, batch)
    total.backward()
    assert float(total.detach()) == 0
    assert float(logits.grad.abs().max()) == 0
    assert loss.count(batch) == 0


# Controls: losses that break the contract, which the proof above must see.


@dataclass(frozen=True)
class MeanOfMeans(CrossEntropy):
    """Divides by each batch's own count, and then by the number of batches."""

    def sum(self, logits, batch):
        return CrossEntropy.sum(self, logits, batch) / CrossEntropy.count(self, batch)

    def count(self, batch):
        return 1


@dataclass(frozen=True)
class ReadsTheCanvas(CrossEntropy):
    """Holds logits small, also those that belong to no image."""

    def sum(self, logits, batch):
        return CrossEntropy.sum(self, logits, batch) + 0.1 * logits.square().sum()


@dataclass(frozen=True)
class ReadsTheImages(CrossEntropy):
    """The same inside the images only: what a loss with an eye for each image looks like."""

    def sum(self, logits, batch):
        own = sum(cut_out(logits, rect).square().sum() for rect in batch.rects)
        return CrossEntropy.sum(self, logits, batch) + 0.1 * own


@pytest.mark.parametrize("loss", [MeanOfMeans, ReadsTheCanvas])
def test_control_a_loss_that_breaks_the_contract(loss):
    found = worst(lambda: loss(ignore_index=IGNORE), "multiclass", "grid")
    assert max(found.values()) > 1e-3, found


def test_a_loss_may_cut_out_each_image():
    found = worst(lambda: ReadsTheImages(ignore_index=IGNORE), "multiclass", "grid")
    assert max(found.values()) < 1e-12, found
