"""Losses on a canvas: a sum over what counts in a step, to be divided by one count.

Never a mean of means: images, canvases, passes and ranks differ in size, so each pass gives its sum
and its count, and `train_step` divides by the count of the whole step. A loss is then the same
however the images were shared out, which tests/training/test_losses.py demands of every one here.

To add a loss: write it here, give it a setting in `config.LossConfig`, and build it in
`build_loss`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from anysize.config import LabelKind, LossConfig, PartMaps
from anysize.data.batch import Batch, cut_out
from anysize.errors import ConfigError


class Loss(Protocol):
    """What training minimises: the sum over a step's batches, divided by their count.

    Both must be additive: a batch that is split into batches of fewer images has the same sum and
    the same count. A loss may read logits and labels inside `batch.rects` only, one rectangle per
    image; what lies outside them belongs to no image.
    """

    @property
    def ignore_index(self) -> int:
        """Value of target entries that do not count, and of all entries outside the images."""
        ...

    def sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """The loss of a batch before the division.

        Args:
            logits: `[n, k, th, tw]`, at the resolution of `batch.target` and on the same device.
            batch: Its target is uint8, or float32 for joints.

        Returns:
            A scalar, in float32 or in the logits' float64.
        """
        ...

    def count(self, batch: Batch) -> int:
        """What this batch adds to the step's divisor; known before the net runs."""
        ...


def build_loss(config: LossConfig, ignore_index: int, part_maps: PartMaps = "discs") -> Loss:
    """The loss that `[loss]` describes, and `model.part_maps` for joints.

    Raises:
        ConfigError: A setting has no effect on this kind of loss.
    """
    assert config.class_weights != "auto", "numbers by now; see training.class_weights"
    if config.kind == "pose":
        if config.focal_gamma or config.dice_share:
            raise ConfigError(
                "`loss.focal_gamma` and `loss.dice_share` are for labels of pixels, but "
                '`loss.kind` is "pose". Leave them out.'
            )
        return PoseLoss(
            ignore_index=ignore_index,
            class_weights=config.class_weights,
            part_maps=part_maps,
            location_weight=config.location_weight,
        )
    make = CrossEntropy if config.kind == "softmax" else SigmoidCrossEntropy
    pixelwise = make(
        ignore_index=ignore_index,
        class_weights=config.class_weights,
        focal_gamma=config.focal_gamma,
    )
    if not config.dice_share:
        return pixelwise
    if config.dice_share == 1 and config.focal_gamma:
        raise ConfigError(
            "`loss.focal_gamma` does nothing where `loss.dice_share` is 1. Leave it out, or lower "
            "the share."
        )
    dice = Dice(labels=config.labels, ignore_index=ignore_index, class_weights=config.class_weights)
    return dice if config.dice_share == 1 else WithDice(pixelwise, dice, config.dice_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """One class per pixel: the mean of `-weight[target] * log softmax(logits)[target]`.

    Attributes:
        ignore_index: Value of pixels that do not count.
        class_weights: One number per class, or empty. The divisor stays the number of pixels.
        focal_gamma: Above 0, each pixel's term is multiplied by `(1 - p) ** focal_gamma`, where `p`
            is the probability of its true class: the focal loss.

    Source: Lin et al., "Focal Loss for Dense Object Detection" (2017), for `focal_gamma`; its alpha
    are the class weights.
    """

    ignore_index: int = 255
    class_weights: tuple[float, ...] = ()
    focal_gamma: float = 0.0

    def sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """See `Loss`; the target is `[n, th, tw]`, classes 0 to k - 1."""
        logits = _at_least_float32(logits)
        target = batch.target.long()
        weight = _beside(logits, self.class_weights) if self.class_weights else None
        ignored = self.ignore_index
        if not self.focal_gamma:
            return F.cross_entropy(logits, target, weight, ignore_index=ignored, reduction="sum")
        terms = F.cross_entropy(logits, target, ignore_index=ignored, reduction="none")
        terms = _focal(terms, self.focal_gamma)
        if weight is not None:
            terms = terms * weight[target.where(target != ignored, 0)]
        return terms.sum()

    def count(self, batch: Batch) -> int:
        """Pixels that are not ignored."""
        return _num_valid(batch.target, self.ignore_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class SigmoidCrossEntropy:
    """Any number of classes per pixel: the mean of `weight[class] * binary cross-entropy`.

    Attributes:
        ignore_index: Value of entries that do not count: a pixel is ignored in all its classes or
            in some of them.
        class_weights: One number per class, or empty. The divisor stays the number of entries.
        focal_gamma: As in `CrossEntropy`; `p` is the probability of the true answer.

    Source: `tf.nn.sigmoid_cross_entropy_with_logits`.
    """

    ignore_index: int = 255
    class_weights: tuple[float, ...] = ()
    focal_gamma: float = 0.0

    def sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """See `Loss`; the target is `[n, k, th, tw]`: 1 where a class is present, 0 where not."""
        logits = _at_least_float32(logits)
        weight = (batch.target != self.ignore_index).to(logits.dtype)
        if self.class_weights:
            weight = weight * _beside(logits, self.class_weights)[:, None, None]
        present = (batch.target == 1).to(logits.dtype)
        if not self.focal_gamma:
            return F.binary_cross_entropy_with_logits(logits, present, weight, reduction="sum")
        terms = F.binary_cross_entropy_with_logits(logits, present, reduction="none")
        return (_focal(terms, self.focal_gamma) * weight).sum()

    def count(self, batch: Batch) -> int:
        """Pairs of pixel and class that are not ignored."""
        return _num_valid(batch.target, self.ignore_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class Dice:
    """One minus the soft Dice coefficient of each image, weighted by its labelled entries.

    Of an image and a class, with probabilities `p` and true answers `t`, 0 or 1, over the entries
    that are not ignored: `(2 sum(p t) + 1) / (sum(p) + sum(t) + 1)`. An image's loss is the mean of
    `weight[class] * (1 - Dice)` over all classes. It counts by its labelled entries, as in the
    other losses, so that losses can be mixed.

    Attributes:
        labels: One class per pixel, or any number of them.
        ignore_index: Value of entries that do not count.
        class_weights: One number per class, or empty.

    Source: Milletari et al., "V-Net" (2016), with sums of probabilities in the denominator instead
    of squares, and the usual 1 that defines it for classes that an image does not have.
    """

    labels: LabelKind
    ignore_index: int = 255
    class_weights: tuple[float, ...] = ()

    def sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """See `Loss`; targets are those of `CrossEntropy` or `SigmoidCrossEntropy`."""
        logits = _at_least_float32(logits)
        weight = _beside(logits, self.class_weights or (1.0,))
        total = logits.new_zeros(())
        for rect in batch.rects:
            own, target = cut_out(logits, rect), cut_out(batch.target, rect)
            valid = target != self.ignore_index
            if self.labels == "multiclass":
                probabilities = own.softmax(0)
                classes = torch.arange(len(own), device=target.device)[:, None, None]
                present = target == classes
            else:
                probabilities, present = own.sigmoid(), target == 1
            probabilities = probabilities * valid
            truth = (present & valid).to(logits.dtype)
            both = (probabilities * truth).sum((1, 2))
            either = probabilities.sum((1, 2)) + truth.sum((1, 2))
            dice = (2 * both + 1) / (either + 1)
            total = total + valid.sum() * (weight * (1 - dice)).mean()
        return total

    def count(self, batch: Batch) -> int:
        """Entries that are not ignored."""
        return _num_valid(batch.target, self.ignore_index)


@dataclass(frozen=True, slots=True)
class WithDice:
    """Cross-entropy, or the focal loss, and Dice together.

    Attributes:
        pixelwise: Has the remaining share.
        dice: Has the same count.
        dice_share: Of Dice, between 0 and 1.
    """

    pixelwise: CrossEntropy | SigmoidCrossEntropy
    dice: Dice
    dice_share: float

    @property
    def ignore_index(self) -> int:
        """See `Loss`."""
        return self.dice.ignore_index

    def sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """See `Loss`."""
        rest = (1 - self.dice_share) * self.pixelwise.sum(logits, batch)
        return rest + self.dice_share * self.dice.sum(logits, batch)

    def count(self, batch: Batch) -> int:
        """Entries that are not ignored."""
        return self.dice.count(batch)


def _focal(terms: Tensor, gamma: float) -> Tensor:
    """Terms `-log p`, each times `(1 - p) ** gamma`; kept off 0, where a root has no gradient."""
    return terms * (-torch.expm1(-terms)).clamp_min(1e-12) ** gamma


@dataclass(frozen=True, slots=True, kw_only=True)
class PoseLoss:
    """Joints: the mean over images of what an image alone has.

    That is the mean over its cells and joints of the part maps' loss; the same of the intermediate
    maps, where logits have them; and `location_weight` times the mean over the cells near a joint
    of the locations' Huber loss, 0 where no joint is labelled.

    Attributes:
        ignore_index: Value of entries that do not count.
        class_weights: One number per joint, for part maps, or empty.
        part_maps: "discs" have sigmoid cross-entropy, "gaussians" the squared error.
        location_weight: Of the locations.

    Source: pose-tensorflow `nnet/pose_net.py` and `losses.py`, whose batches hold one image;
    DeepLabCut's `WeightedMSECriterion`.
    """

    ignore_index: int = 255
    class_weights: tuple[float, ...] = ()
    part_maps: PartMaps = "discs"
    location_weight: float = 0.05

    def sum(self, logits: Tensor, batch: Batch) -> Tensor:
        """See `Loss`; of the target see `anysize.data.joints`."""
        logits = _at_least_float32(logits)
        total = logits[:0].sum()
        for rect in batch.rects:
            own, target = cut_out(logits, rect), cut_out(batch.target, rect).to(logits.dtype)
            num_joints = len(target) // 3
            total = total + self._of_maps(own[:num_joints], target[:num_joints])
            if len(own) > 3 * num_joints:
                total = total + self._of_maps(own[3 * num_joints :], target[:num_joints])
            found, wanted = own[num_joints : 3 * num_joints], target[num_joints:]
            near = (wanted != self.ignore_index).to(logits.dtype)
            located = F.huber_loss(found * near, wanted * near, reduction="sum")
            total = total + self.location_weight * located / near.sum().clamp(min=1)
        return total

    def _of_maps(self, maps: Tensor, target: Tensor) -> Tensor:
        valid = (target != self.ignore_index).to(maps.dtype)
        weight = valid
        if self.class_weights:
            weight = valid * _beside(maps, self.class_weights)[:, None, None]
        if self.part_maps == "discs":
            each = F.binary_cross_entropy_with_logits(maps, target * valid, reduction="none")
        else:
            each = (maps - target).square()
        return (weight * each).sum() / valid.sum().clamp(min=1)

    def count(self, batch: Batch) -> int:
        """Images."""
        return sum(
            bool((cut_out(batch.target, rect) != self.ignore_index).any()) for rect in batch.rects
        )


def _num_valid(target: Tensor, ignore_index: int) -> int:
    return int(torch.count_nonzero(target != ignore_index))


def _beside(logits: Tensor, weights: tuple[float, ...]) -> Tensor:
    return _on_device(weights, logits.dtype, logits.device)


@functools.lru_cache(maxsize=4)
def _on_device(weights: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copied to the device once, not in each step."""
    return torch.tensor(weights, dtype=dtype, device=device)


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()
