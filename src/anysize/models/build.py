"""The net that `[model]` describes. To add one, add a case to both functions.

PyTorch is imported when a net is built, so that canvases are planned without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anysize.config import ModelConfig
from anysize.geometry import NetGeometry
from anysize.models.levels import resnet_geometry

if TYPE_CHECKING:
    import torch

    from anysize.models.net import Net


def geometry_of(config: ModelConfig) -> NetGeometry:
    """What placements need to know of the net; that of `build_model`.

    Our own nets are not built for it; those that `model.net` names are.
    """
    if config.net:
        from anysize.models.any_net import geometry_of_any

        return geometry_of_any(config)
    return resnet_geometry(config)


def build_model(
    config: ModelConfig, num_classes: int, *, generator: torch.Generator | None = None
) -> Net:
    """Builds the net with initial weights drawn from `generator`.

    Args:
        config: `[model]`.
        num_classes: Channels of the logits; see `anysize.data.joints.num_logits`.
        generator: None draws from PyTorch's own.
    """
    if config.net:
        from anysize.models.any_net import build_any

        return build_any(config, num_classes, generator=generator)
    from anysize.models.fcn import build_fcn

    return build_fcn(config, num_classes, generator=generator)
