"""The settings of a run: `run.toml`, what weights decide, and what a resumed run may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anysize.config import (
    ModelConfig,
    PixelConvention,
    RunConfig,
    Settings,
    base_of,
    load_config,
)
from anysize.errors import ConfigError
from anysize.models.weights_file import OF_THE_BODY, describe_weights_file, is_ours

FROM_SCRATCH = {"model": {"norm": "trained", "norm_decay": 0.9}}
"""What a run without weights has unless it says otherwise.

Frozen statistics of a net that was never trained are those of no image; and moving ones that keep
99.7% of their value in each step are not there yet after some hundred steps."""

OF_OTHERS = {"max_value": 1.0, "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
"""Pixels of three channels as nets of torchvision, timm and others take them.

Source: torchvision's `ImageClassification` preset; timm's `IMAGENET_DEFAULT_MEAN`."""


def load_run_config(path: Settings, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a `run.toml`; what it leaves open about the net, `train.weights` decides.

    The depth, the rules of padding, stride and dilation, and the pixel convention are those that
    the weights were trained with, unless the TOML file says otherwise. Without weights, norms are
    trained (`FROM_SCRATCH`). A net that `model.net` names is always named by the TOML file; its
    norms are trained and its pixels those of `OF_OTHERS` unless that says otherwise.

    Raises:
        ConfigError: As `load_config`.
        WeightsError: The file that `train.weights` names cannot be read.
    """
    config = load_config(path, overrides)
    weights = base_of(path) / config.train.weights
    if config.model.net:
        defaults: dict[str, dict[str, Any]] = {"model": {"norm": "trained"}}
        if config.train.weights and is_ours(weights):
            defaults["pixels"] = dataclasses.asdict(describe_weights_file(weights).pixels)
        elif config.model.num_channels == 3:
            defaults["pixels"] = OF_OTHERS
        return load_config(path, overrides, defaults=defaults)
    if not config.train.weights:
        return load_config(path, overrides, defaults=FROM_SCRATCH)
    file = describe_weights_file(weights)
    if file.config.net:
        raise ConfigError(
            f"The weights in {weights} are for the net {file.config.net}. Set `model.net` to it, "
            f"and [model.arguments] to {dict(file.config.arguments)}, if you know that code."
        )
    return load_config(path, overrides, defaults=_left_open(file.config, file.pixels))


def config_as_begun(path: Settings, overrides: Sequence[str], began_with: Path) -> RunConfig:
    """Reads a `run.toml` to resume a run; what it leaves open about the net is as it was.

    So the weights that a run started from need not be there any more.

    Args:
        path: The TOML file.
        overrides: As in `load_config`.
        began_with: The run's own copy of its settings.

    Raises:
        ConfigError: As `load_config`, of either file.
    """
    before = load_config(began_with)
    defaults = _left_open(before.model, before.pixels)
    net = ("norm", "norm_decay", "net", "arguments")
    defaults["model"] |= {key: getattr(before.model, key) for key in net}
    config = load_config(path, overrides, defaults=defaults)
    if config.loss.class_weights != "auto":
        return config
    loss = dataclasses.replace(config.loss, class_weights=before.loss.class_weights)
    return dataclasses.replace(config, loss=loss)


def _left_open(model: ModelConfig, pixels: PixelConvention) -> dict[str, dict[str, Any]]:
    net = dataclasses.asdict(model)
    return {
        "model": {key: net[key] for key in ("depth", "units", *OF_THE_BODY)},
        "pixels": dataclasses.asdict(pixels),
    }


MAY_CHANGE = {
    "data.root",
    "data.skip_broken",
    "model.activation_checkpointing",
    "train.run",
    "train.weights",
    "train.epochs",
    "train.device",
    "train.log_every",
    "train.checkpoint_every",
    "train.evaluate_every",
    "train.patience",
    "train.tensorboard",
    "train.loader_threads",
    "train.prefetch_steps",
    "train.max_bad_steps",
}
"""Keys that a resumed run may have changed: they do not alter the steps already done, and what the
data are is held by their fingerprint."""


def with_whole_paths(config: RunConfig, base: Path) -> RunConfig:
    """Paths relative to `run.toml` made whole, so that the run's own copy of it holds anywhere."""

    def whole(path: str) -> str:
        return str(base / path) if path else ""

    return dataclasses.replace(
        config,
        data=dataclasses.replace(config.data, root=whole(config.data.root)),
        plan=dataclasses.replace(config.plan, file=whole(config.plan.file)),
        train=dataclasses.replace(
            config.train, run=whole(config.train.run), weights=whole(config.train.weights)
        ),
    )


def check_same_settings(run: Path, config: RunConfig) -> None:
    """Raises a ConfigError where a resumed run has other settings than it began with."""
    path = run / "run.toml"
    before, now = _flat(load_config(path)), _flat(config)
    changed = [
        f"{key} was {before[key]!r}, is {now[key]!r}"
        for key in now
        if before[key] != now[key] and key not in MAY_CHANGE
    ]
    if changed:
        raise ConfigError(
            f"The settings are not those of the run in {run}: {'; '.join(changed)}. "
            "Set them back, or start a new run."
        )


def _flat(config: RunConfig) -> dict[str, Any]:
    return {
        f"{section}.{key}": value
        for section, table in dataclasses.asdict(config).items()
        for key, value in table.items()
    }
