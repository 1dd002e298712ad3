"""A run's settings: frozen dataclasses, read from one TOML file, with `--set a.b=value` overrides.

Unknown keys are errors that suggest the nearest known one. Defaults are those of the system that
Anysize replaces, where it had one.
"""

from __future__ import annotations

import dataclasses
import tomllib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from anysize.errors import ConfigError
from anysize.geometry import LossAt, NetGeometry, PoolPadding
from anysize.tables import Count, Index, NotNegative, Positive, Share, Within, from_table

LabelKind = Literal["multiclass", "multilabel", "joints"]
"""What labels are: one class per pixel, any number of them, or joints of people or animals."""

LossKind = Literal["softmax", "sigmoid", "pose"]
LABELS_OF: Mapping[LossKind, LabelKind] = {
    "softmax": "multiclass",
    "sigmoid": "multilabel",
    "pose": "joints",
}
"""The losses that `loss.kind` names, and the labels that each takes.

`training.losses.build_loss` builds the loss; the labels decide how masks are read, how logits
become labels and which metric counts (`predict.metrics`).
"""

PartMaps = Literal["discs", "gaussians"]
DeviceName = Literal["auto", "cpu", "cuda", "mps"]

FolderLayout = Literal["anysize", "voc", "cityscapes", "ultralytics"]
MaskKind = Literal[
    "index", "colours", "binary", "folders", "stack", "labelme", "coco", "polygons", "joints"
]

UNITS = {
    18: (2, 2, 2, 2),
    34: (3, 4, 6, 3),
    50: (3, 4, 6, 3),
    101: (3, 4, 23, 3),
    152: (3, 8, 36, 3),
    200: (3, 24, 36, 3),
}
BASIC_DEPTHS = (18, 34)
"""Nets of basic units, two 3x3 convolutions each; the others have bottleneck units."""

"""Units a block of resnet_v1, by depth. Source: tf_slim nets/resnet_v1.py."""


INTERMEDIATE_UNIT = 12
"""Of block 3: what `model.intermediate` has its head on. Source: pose-tensorflow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PixelConvention:
    """`[pixels]`: how an image becomes the net's input; saved inside every weights file.

    A run that starts from weights takes theirs; all but `white` and `float_range` must then be left
    out.

    input = (channels in `channel_order`, scaled so that white is `max_value`, - `mean`) / `std`.

    Attributes:
        channel_order: "RGB" or "BGR": the order of the channels that the net is trained with.
        max_value: Value of white: 255, or 1 for torchvision's weights.
        mean, std: In `channel_order` and on the scale of `max_value`; one a channel of the net.
        white: Value of white in files of 16 bits: 4095 for a camera of 12 bits. In files of 8 bits
            it is 255.
        float_range: The values of black and of white in TIFFs of floating point, which are refused
            without it.

    Source: tf_slim's vgg preprocessing, whose means the resnet_v1 checkpoints use.
    """

    channel_order: Literal["RGB", "BGR"] = "RGB"
    max_value: Positive = 255.0
    mean: tuple[float, ...] = (123.68, 116.779, 103.939)
    std: tuple[Positive, ...] = (1.0, 1.0, 1.0)
    white: Annotated[int, Within(255, 65535)] = 65535
    float_range: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """`[data]`: where images, masks and classes are.

    Attributes:
        root: Folder of the data; relative to the TOML file.
        layout: How the folder is laid out: "anysize" (`images/` and `masks/`), "voc",
            "cityscapes" or "ultralytics". "auto" tells by the folders that are there.
        masks: How labels are stored: "index" (ids in a PNG, BMP or TIFF), "colours", "binary"
            (0 and 255), "folders" (one per class), "stack" (a page per class), "labelme", "coco"
            or "polygons" (Ultralytics). "auto" compares all files.
        mask_pattern: How masks are named: "{stem}_mask" pairs `a.jpg` with `a_mask.png`.
        mask_orientation: Whether a mask's own EXIF orientation is applied: "apply", "ignore", or
            "auto", which applies it where the image's size shows that, and else asks. For shapes it
            is their image's orientation.
        ids: What values of masks mean, a class or "ignore": `{0 = "ignore", 7 = "road"}`; empty
            where they are the ids of `classes.toml`.
        images: Folder of images, relative to `root`; empty is that of the layout.
        labels: Folder of masks or LabelMe files, or the COCO file, relative to `root`; empty is
            that of the layout.
        train: A text file with one stem per line, relative to `root`; empty takes the split of the
            layout, or draws one. With "coco" it may be a COCO file.
        val: The same for evaluation.
        val_fraction: Share of images held out when no lists are given.
        skip_broken: Leave out, count and name an image that cannot be read, or whose labels do not
            hold, in the middle of a run, instead of stopping.
    """

    root: str
    layout: Literal["auto", FolderLayout] = "auto"
    masks: Literal["auto", MaskKind] = "auto"
    mask_pattern: str = "{stem}"
    mask_orientation: Literal["auto", "apply", "ignore"] = "auto"
    ids: Mapping[str, str] = field(default_factory=dict[str, str])
    images: str = ""
    labels: str = ""
    train: str = ""
    val: str = ""
    val_fraction: Share = 0.2
    skip_broken: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    """`[plan]`: how images are put on canvases.

    Attributes:
        file: A plan file made by `anysize plan`, relative to the TOML file; empty plans afresh.
        images_per_step: Images an optimiser step, whatever the number of canvases they need.
        max_pixels_per_step: Most canvas pixels computed at once. What does not fit is accumulated.
        max_canvases: Most canvas shapes; 0 chooses the number automatically.
    """

    file: str = ""
    images_per_step: Count = 4
    max_pixels_per_step: Count = 1_048_576
    max_canvases: Index = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """`[model]`: the net.

    Attributes:
        net: Empty: a ResNet v1, by the keys below. "package.module:build": a function or class that
            gives a `torch.nn.Module`. "smp:Unet", "torchvision:deeplabv3_resnet50" and
            "timm:convnext_tiny": one of these libraries' (timm: with our upsampling head).
        arguments: Of `net`'s function, as `[model.arguments]`; for `net` only.
        depth: 18, 34, 50, 101, 152 or 200; ignored where `units` is given.
        units: Units in each of the four blocks, for a net of another depth.
        basic_units: Those of `units` have two 3x3 convolutions, as in ResNet-18 and 34, in place of
            a bottleneck.
        num_channels: Of the images, as the first convolution takes them; grey images become RGB
            where it is 3.
        base_depth: Channels of the stem and of the first bottleneck; 64 in the paper.
        output_stride: Pixels a cell of the body's output: 8, 16 or 32.
        pool_padding, stride_position, dilation_rule: See `anysize.models.resnet_v1`.
        norm: "frozen": statistics fixed, gamma and beta trained. "trained": statistics of the valid
            pixels of the step; the default of a run without `train.weights`, with `norm_decay` 0.9.
        norm_decay: Share of the moving statistics that a step keeps, where they are trained; lower
            it for runs of fewer than some thousand steps.
        head_relu: The head ends with a ReLU, as `slim.conv2d_transpose` has one unless told
            otherwise; for weights that were trained so.
        loss_at: "grid": at the logits' grid, half the output stride. "full": at full resolution.
        activation_checkpointing: Recompute each unit in the backward pass: less memory, more time.
        part_maps: What a net of joints is trained to show: "discs", by sigmoid cross-entropy, or
            "gaussians", by squared error; see `anysize.data.joints`.
        intermediate: A net of joints has another head for part maps on unit 12 of block 3, which
            helps in training and is not used afterwards.
    """

    net: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    depth: int = 50
    units: tuple[Annotated[int, Within(1, 1000)], ...] = ()
    basic_units: bool = False
    num_channels: Annotated[int, Within(1, 64)] = 3
    base_depth: Annotated[int, Within(1, 4096)] = 64
    output_stride: Literal[8, 16, 32] = 16
    pool_padding: PoolPadding = "same"
    stride_position: Literal["last_3x3", "first_3x3", "first_1x1"] = "last_3x3"
    dilation_rule: Literal["new", "previous"] = "new"
    norm: Literal["frozen", "trained"] = "frozen"
    norm_decay: Annotated[float, Within(0, 0.999999)] = 0.997
    head_relu: bool = False
    loss_at: Literal["grid", "full"] = "grid"
    activation_checkpointing: bool = False
    part_maps: PartMaps = "discs"
    intermediate: bool = False


UpToOne = Annotated[float, Within(0, 1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """`[loss]`.

    Attributes:
        kind: "softmax": one class per pixel. "sigmoid": any number of classes. "pose": joints of
            people or animals, by part maps and locations.
        class_weights: One weight per class, in the order of `classes.toml`, or per joint; empty
            weighs all the same. "auto" takes them from the training masks (median frequency), and
            writes them into the run.
        focal_gamma: Above 0, the focal loss: what is already right counts less, by
            `(1 - p) ** focal_gamma`; 2 is usual.
        dice_share: Share of the Dice loss: 0.5 mixes both in equal parts, 1 is Dice alone.
        radius: Pixels around a joint that "pose" calls the joint, before `[augment]` scales them.
        location_weight: Of the locations of "pose", beside part maps of weight 1.
    """

    kind: LossKind = "softmax"
    class_weights: tuple[NotNegative, ...] | Literal["auto"] = ()
    focal_gamma: Annotated[float, Within(0, 10)] = 0.0
    dice_share: UpToOne = 0.0
    radius: Annotated[float, Within(1, 200)] = 17.0
    location_weight: NotNegative = 0.05

    @property
    def labels(self) -> LabelKind:
        """What labels are."""
        return LABELS_OF[self.kind]


Factor = Annotated[float, Within(0.01, 100)]


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentConfig:
    """`[augment]`: joint changes of image and mask.

    Attributes:
        min_scale, max_scale: The image is rescaled by a factor drawn log-uniformly between them.
        mirror: Mirror left and right with probability one half.
        brightness, contrast, saturation: A factor drawn uniformly from `1 - x` to `1 + x`.
        crop: (height, width) of a random crop of images larger than it; empty keeps the whole.
        module: `package.module:function` that changes image and mask further; see docs/how-to.md.
    """

    min_scale: Factor = 1.0
    max_scale: Factor = 1.0
    mirror: bool = True
    brightness: UpToOne = 0.0
    contrast: UpToOne = 0.0
    saturation: UpToOne = 0.0
    crop: tuple[Count, ...] = ()
    module: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimConfig:
    """`[optim]`: optimiser and learning rate.

    Attributes:
        kind: "sgd": v = mu * v + g; w -= lr * v, as in TensorFlow. "adamw": decoupled decay.
        lr: Learning rate at the start.
        momentum: mu of SGD.
        weight_decay: On convolution weights only, never on norms and biases.
        schedule: "constant", "multistep" or "poly".
        milestones: Steps at which "multistep" multiplies the rate by `gamma`.
        gamma: Factor of "multistep".
        power: Exponent of "poly": lr * (1 - step / steps) ** power.
        warmup_steps: Steps over which the rate rises linearly from zero.
    """

    kind: Literal["sgd", "adamw"] = "sgd"
    lr: NotNegative = 0.001
    momentum: Annotated[float, Within(0, 0.999999)] = 0.9
    weight_decay: NotNegative = 1e-4
    schedule: Literal["constant", "multistep", "poly"] = "constant"
    milestones: tuple[Index, ...] = ()
    gamma: NotNegative = 0.1
    power: Annotated[float, Within(0, 100)] = 0.9
    warmup_steps: Index = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """`[train]`: the loop.

    Attributes:
        run: Folder of the run, relative to the TOML file.
        epochs: Passes over the training images.
        seed: Of the split, the order, the augmentation and the initial weights.
        device: "auto" takes an NVIDIA or AMD GPU where there is one. "mps" is Apple's; it was never
            tested.
        precision: "bf16" computes under autocast with float32 weights.
        tf32: Let GPUs round the inputs of float32 convolutions to TF32, which is faster; off, so
            that "float32" means float32.
        channels_last: Memory format of activations and weights.
        weights: A safetensors file to start from, relative to the TOML file; empty starts afresh.
            With `model.net` also a state dict of the library.
        log_every: Steps between two lines of the console and of `events.jsonl`.
        checkpoint_every: Steps between two checkpoints; one is written at the end anyway.
        evaluate_every: Epochs between two evaluations; 0 evaluates at the end only.
        patience: The run stops after so many epochs without a better score; 0 never does.
        tensorboard: Also write scalars and example images for TensorBoard, in `tensorboard/`.
        loader_threads: Threads that decode images and place them.
        prefetch_steps: Steps that are made ready ahead of the one that runs.
        max_bad_steps: Steps in a row that may be skipped since their loss or gradient is not
            finite; then the run stops.
    """

    run: str = "run"
    epochs: Count = 10
    seed: Annotated[int, Within(0, 2**63 - 1)] = 0
    device: DeviceName = "auto"
    precision: Literal["float32", "bf16"] = "bf16"
    tf32: bool = False
    channels_last: bool = True
    weights: str = ""
    log_every: Count = 10
    checkpoint_every: Count = 100
    evaluate_every: Index = 1
    patience: Index = 0
    tensorboard: bool = False
    loader_threads: Annotated[int, Within(1, 1024)] = 1
    prefetch_steps: Annotated[int, Within(1, 1000)] = 4
    max_bad_steps: Count = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """All of `run.toml`."""

    data: DataConfig
    plan: PlanConfig = field(default_factory=PlanConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    augment: AugmentConfig = field(default_factory=AugmentConfig)
    pixels: PixelConvention = field(default_factory=PixelConvention)
    optim: OptimConfig = field(default_factory=OptimConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    @property
    def loss_at(self) -> LossAt:
        """Where labels lie; those of joints at all cells of the logits."""
        return "cells" if self.loss.labels == "joints" else self.model.loss_at


Settings: TypeAlias = Path | Mapping[str, Mapping[str, Any]]
"""A `run.toml`, or its sections as Python has them; paths in these are relative to where one is."""


def base_of(settings: Settings) -> Path:
    """The folder that paths in settings are relative to."""
    return Path.cwd() if isinstance(settings, Mapping) else settings.resolve().parent


def load_config(
    path: Settings,
    overrides: Sequence[str] = (),
    defaults: Mapping[str, Mapping[str, Any]] | None = None,
) -> RunConfig:
    """Reads `run.toml` and applies overrides of the form `section.key=value`.

    Args:
        path: The TOML file, or its sections.
        overrides: A value is read as TOML, and as a plain string where it is not TOML.
        defaults: Sections with values for keys that neither the file nor an override gives. One of
            `model.depth` and `model.units` that is given keeps out the other.

    Raises:
        ConfigError: No such file, not TOML, an unknown key, a value of the wrong type or range.
    """
    table, source = _read_table(path)
    for override in overrides:
        _apply_override(table, override)
    for section, values in (defaults or {}).items():
        _fill_in(table, section, values)
    config = from_table(RunConfig, table, source)
    _check_together(config, source)
    return config


def _read_table(path: Settings) -> tuple[dict[str, Any], str]:
    """The sections of settings, to be changed at will, and what messages call them."""
    if isinstance(path, Mapping):
        return typing.cast("dict[str, Any]", _plain(path)), "the settings given"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except IsADirectoryError:
        own = path / "run.toml"
        what = f"is a run folder. Its settings are in {own}; name that, with --resume to go on."
        raise ConfigError(
            f"{path} {what if own.is_file() else 'is a folder, not a run.toml. Name a file.'}"
        ) from None
    except FileNotFoundError:
        raise ConfigError(
            f"No such file: {path}. `anysize init DATA` writes a run.toml for a data folder."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as TOML: {error}.") from None
    return table, str(path)


def _plain(value: object) -> object:
    """Python's values as TOML has them."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in typing.cast("Mapping[Any, object]", value).items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in typing.cast("Sequence[object]", value)]
    return str(value) if isinstance(value, Path) else value


def read_geometry(table: object, source: str) -> NetGeometry:
    """The geometry of a net from a parsed JSON table, in which the usual values may be left out.

    Raises:
        ConfigError: It is not a table, or a value is of the wrong type or range; names `source`.
    """
    geometry = from_table(NetGeometry, table, source, prefix="geometry.")
    if geometry.output_stride % geometry.logits_per_cell:
        raise ConfigError(
            f"`geometry.output_stride` is {geometry.output_stride}, which is not a multiple of "
            f"`geometry.logits_per_cell` {geometry.logits_per_cell} ({source})."
        )
    if geometry.pool_padding != "none" and geometry.output_stride not in (8, 16, 32):
        raise ConfigError(
            f"`geometry.output_stride` is {geometry.output_stride}; with `pool_padding` "
            f"{geometry.pool_padding!r} it must be one of 8, 16, 32 ({source})."
        )
    return geometry


def _apply_override(table: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or len(parts) != 2:
        raise ConfigError(f"--set takes section.key=value, got {override!r}.")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        value = text
    section = table.setdefault(parts[0], {})
    if not isinstance(section, dict):
        raise ConfigError(f"--set {override}: {parts[0]!r} is not a section.")
    typing.cast("dict[str, Any]", section)[parts[1]] = value


def _fill_in(table: dict[str, Any], section: str, values: Mapping[str, Any]) -> None:
    entry = table.setdefault(section, {})
    if not isinstance(entry, dict):
        return  # Reported when the section is read.
    given = typing.cast("dict[str, Any]", entry)
    depth_is_given = section == "model" and ("depth" in given or "units" in given)
    for key, value in values.items():
        if not (depth_is_given and key in ("depth", "units")):
            given.setdefault(key, _plain(value))


OF_ANY_NET = ("net", "arguments", "num_channels", "norm", "loss_at", "part_maps")
"""Keys of `[model]` that are not of the ResNets only."""


def _check_net(model: ModelConfig, source: str) -> None:
    if not model.net:
        if model.arguments:
            raise ConfigError(
                f"`model.arguments` are those of `model.net`, which is empty ({source}). Set "
                "`model.net`, or leave them out."
            )
        return
    package, colon, name = model.net.partition(":")
    if not (colon and all(p.isidentifier() for p in (*package.split("."), *name.split(".")))):
        raise ConfigError(
            f"`model.net` is {model.net!r}; it must be like package.module:build, smp:Unet, "
            f"torchvision:fcn_resnet50 or timm:convnext_tiny ({source})."
        )
    for key in dataclasses.fields(model):
        if key.name not in OF_ANY_NET and getattr(model, key.name) != key.default:
            raise ConfigError(
                f"`model.{key.name}` is a setting of the ResNets, but `model.net` is {model.net!r} "
                f"({source}). Leave it out; a setting of the net itself goes to [model.arguments]."
            )


def check_model(model: ModelConfig, source: str) -> None:
    """Raises a ConfigError, which names `source`, where settings of the net are invalid."""
    _check_net(model, source)
    if model.units and len(model.units) != 4:
        raise ConfigError(
            f"`model.units` has {len(model.units)} numbers; it must have 4 ({source})."
        )
    if not model.units and model.depth not in UNITS:
        raise ConfigError(
            f"`model.depth` is {model.depth}; it must be one of "
            f"{', '.join(map(str, UNITS))}, or give `model.units` ({source})."
        )
    if model.basic_units and not model.units:
        raise ConfigError(
            f"`model.basic_units` is for nets that `model.units` describes ({source}). Leave it "
            "out, or give `model.units`; ResNet-18 and 34 have basic units anyway."
        )
    basic = model.basic_units or (not model.units and model.depth in BASIC_DEPTHS)
    if basic and model.stride_position == "first_1x1":
        raise ConfigError(
            f'`model.stride_position` is "first_1x1", but the net has basic units, which have no '
            f'1x1 convolution ({source}). Set it to "first_3x3".'
        )
    if model.stride_position == "last_3x3" and model.dilation_rule == "previous":
        raise ConfigError(
            f'`model.dilation_rule` "previous" goes with a stride in the first unit ({source}). '
            'Set `model.stride_position` to "first_3x3", as torchvision has it.'
        )
    units = model.units or UNITS[model.depth]
    if model.intermediate and (units[2] < INTERMEDIATE_UNIT or model.output_stride == 32):
        raise ConfigError(
            f"`model.intermediate` is a head on unit {INTERMEDIATE_UNIT} of block 3, but block 3 "
            f"has {units[2]} units and the output stride is {model.output_stride} ({source}). Use "
            "a net of depth 101 and an output stride of 8 or 16, or leave it out."
        )


def _check_pose(config: RunConfig, source: str) -> None:
    is_pose = config.loss.labels == "joints"
    wanted = {"model.part_maps": "discs", "model.intermediate": False}
    if is_pose:
        wanted = {"model.loss_at": "grid", "model.head_relu": False}
        wanted |= {"loss.focal_gamma": 0.0, "loss.dice_share": 0.0}
    for key, value in wanted.items():
        section, _, name = key.partition(".")
        if (found := getattr(getattr(config, section), name)) != value:
            goes = "does not go" if is_pose else "goes only"
            raise ConfigError(
                f'`{key}` is {found!r}, which {goes} with loss.kind "pose" ({source}). Leave it '
                "out."
            )
    if is_pose and config.loss.class_weights == "auto":
        raise ConfigError(
            f'`loss.class_weights` "auto" counts pixels of masks, and joints have none ({source}). '
            "Give one weight per joint, or leave it out."
        )


def _check_together(config: RunConfig, source: str) -> None:
    check_model(config.model, source)
    _check_pose(config, source)
    weights = config.loss.class_weights
    if weights and not any(weights):
        raise ConfigError(
            f"`loss.class_weights` are all 0, so nothing would be learned ({source})."
        )
    if config.train.patience and not config.train.evaluate_every:
        raise ConfigError(
            f"`train.patience` needs evaluations, but `train.evaluate_every` is 0 ({source}). Set "
            "it to 1 or more."
        )
    if config.augment.max_scale < config.augment.min_scale:
        raise ConfigError(
            f"`augment.max_scale` {config.augment.max_scale} is below `augment.min_scale` "
            f"{config.augment.min_scale} ({source})."
        )
    crop = config.augment.crop
    if crop and len(crop) != 2:
        raise ConfigError(f"`augment.crop` is {list(crop)}; it must be [height, width] ({source}).")
    check_pixels(config.pixels, config.model.num_channels, source)
    pattern = config.data.mask_pattern
    if pattern.count("{stem}") != 1 or "/" in pattern or "\\" in pattern:
        raise ConfigError(
            f"`data.mask_pattern` is {pattern!r}; it must be a file name without its suffix that "
            f'has {{stem}} in it once, such as "{{stem}}_mask" ({source}).'
        )
    if bool(config.data.train) != bool(config.data.val):
        raise ConfigError(
            f"`data.train` and `data.val` go together ({source}). Give both lists or neither."
        )


def check_pixels(pixels: PixelConvention, num_channels: int, source: str) -> None:
    """Raises a ConfigError, which names `source`, where a pixel convention is invalid."""
    for key in ("mean", "std"):
        values = getattr(pixels, key)
        if len(values) != num_channels:
            wanted = "three numbers" if num_channels == 3 else f"of length {num_channels}"
            raise ConfigError(
                f"`pixels.{key}` is {list(values)}; it must be {wanted}, one for each of "
                f"`model.num_channels` ({source})."
            )
    if pixels.channel_order == "BGR" and num_channels != 3:
        raise ConfigError(
            f'`pixels.channel_order` "BGR" is for three channels, but `model.num_channels` is '
            f"{num_channels} ({source}). Leave it out."
        )
    given = pixels.float_range
    if given and (len(given) != 2 or not given[0] < given[1] or pixels.white != 65535):
        raise ConfigError(
            f"`pixels.float_range` is {list(given)}; it must be [black, white], black below white, "
            f"and `pixels.white` is then left out ({source})."
        )
