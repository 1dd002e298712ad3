"""Nets of other packages in a run: imported by the name that `[model]` gives, and put on canvases.

`package.module:build` imports and calls code, so it is called only where a person named it: in a
`run.toml`, or by a flag (`anysize.models.weights_file.load_weights`). The nets of the libraries are
chosen from their own lists, and nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib
import importlib.metadata
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from anysize.config import ModelConfig
from anysize.errors import AnysizeError, ConfigError, ShapeError, UnsupportedNetError
from anysize.geometry import Layout, NetGeometry, round_up
from anysize.models.fcn import UpsamplingHead
from anysize.models.net import Net
from anysize.models.on_canvas import OnCanvas, chosen_output, geometry_of_net

LIBRARIES = {
    "smp": ("segmentation_models_pytorch", "segmentation-models-pytorch"),
    "torchvision": ("torchvision", "torchvision"),
    "timm": ("timm", "timm"),
}
"""The module to import and the package to install, by the name before the colon."""

_CHECKED_EXTENT = 256


class AnyNet(OnCanvas, Net):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A net of any package as a run knows nets; the state dict is the net's own.

    A batch norm behind global pooling has one value per image and channel, so PyTorch refuses to
    train it on one image. In passes of one image it takes its moving statistics instead.
    """

    def __init__(
        self,
        net: nn.Module,
        geometry: NetGeometry,
        *,
        norms_frozen: bool,
        pooled_norms: Sequence[str] = (),
    ) -> None:
        super().__init__(net)
        self._pooled_norms = [net.get_submodule(name) for name in pooled_norms]
        self._geometry = geometry
        self._norms_frozen = norms_frozen
        self._multiple = geometry.size_multiple

    @property
    def geometry(self) -> NetGeometry:
        """See `Net`."""
        return self._geometry

    def train(self, mode: bool = True) -> AnyNet:
        """Training or evaluation mode; frozen batch norms keep their statistics in both."""
        super().train(mode)
        if self._norms_frozen:
            for module in self.modules():
                if isinstance(module, _BatchNorm):
                    module.eval()
        return self

    def forward(self, pixels: Tensor, layout: Layout) -> Tensor:
        """See `Net`.

        Raises:
            ShapeError: As `OnCanvas`; or a batch norm in training has one value per channel.
        """
        alone = len(layout.placements) == 1
        waiting = [norm for norm in self._pooled_norms if alone and norm.training]
        for norm in waiting:
            norm.eval()
        try:
            return super().forward(pixels, layout)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            sizes = ", ".join(str(p.size) for p in layout.placements)
            raise ShapeError(
                f"In training, a batch norm has one value per channel for images of {sizes}. Raise "
                'plan.images_per_step, use larger images, or set model.norm to "frozen".'
            ) from error
        finally:
            for norm in waiting:
                norm.train()


class _TimmLabeller(nn.Module):
    """The feature maps of a classifier of timm, and our head on the coarsest of them."""

    def __init__(self, body: nn.Module, num_channels: int, num_classes: int) -> None:
        super().__init__()
        self.body = body
        shape = _output_shape(body, num_channels)
        if len(shape) != 4:
            raise UnsupportedNetError(
                f"{type(body).__name__} of timm gives features of {shape}, not [n, c, h, w]. Take "
                "a convolutional net."
            )
        self.head = UpsamplingHead(shape[1], num_classes)

    def forward(self, pixels: Tensor) -> Tensor:
        """`[n, c, h, w]` to logits at half the body's stride."""
        return self.head(self.body(pixels))


def build_any(
    config: ModelConfig, num_classes: int, *, generator: torch.Generator | None = None
) -> AnyNet:
    """The net that `model.net` names; arguments as of `anysize.models.build.build_model`.

    Raises:
        ConfigError: It cannot be imported or built, or has another number of classes.
        UnsupportedNetError: It cannot run on canvases.
    """
    with _initial_weights_of(generator):
        net = built_net(config, num_classes)
    geometry = geometry_of_net(net, num_channels=config.num_channels)
    pooled: list[str] = []
    shape = _output_shape(net, config.num_channels, geometry.size_multiple, pooled)
    if len(shape) != 4 or shape[1] != num_classes:
        raise ConfigError(
            f"`model.net` {config.net} gives {shape} for pixels [1, {config.num_channels}, h, w], "
            f"but there are {num_classes} classes: it must give [1, {num_classes}, h', w']. It is "
            "told their number if its function has a parameter `num_classes`; else give it in "
            "[model.arguments]."
        )
    frozen = config.norm == "frozen"
    return AnyNet(net, geometry, norms_frozen=frozen, pooled_norms=pooled)


def geometry_of_any(config: ModelConfig) -> NetGeometry:
    """What placements need to know of the net that `model.net` names, found by building it."""
    return _geometry(config.net, json.dumps(config.arguments), config.num_channels)


@functools.lru_cache(maxsize=4)
def _geometry(net: str, arguments: str, num_channels: int) -> NetGeometry:
    config = ModelConfig(net=net, arguments=json.loads(arguments), num_channels=num_channels)
    with _initial_weights_of(torch.Generator()):
        return geometry_of_net(built_net(config, 2), num_channels=num_channels)


def is_of_a_library(net: str) -> bool:
    """Whether `model.net` names a net from a library's own list, which is no one else's code."""
    return net.partition(":")[0] in LIBRARIES


def package_of(net: str) -> str:
    """Name and version of the package that a net comes from; empty if it is of no package."""
    module = net.partition(":")[0]
    if module in LIBRARIES:
        names = [LIBRARIES[module][1]]
    else:
        names = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{name} {importlib.metadata.version(name)}"
    return ""


def built_net(config: ModelConfig, num_classes: int) -> nn.Module:
    """The net that `model.net` names, as its package gives it.

    Raises:
        ConfigError: It cannot be built, or is not a net.
    """
    library, _, name = config.net.partition(":")
    known: dict[str, Any] = {}
    match library:
        case "smp":
            build = getattr(_library(config.net), name, None)
            known = {"in_channels": config.num_channels, "classes": num_classes}
            if not (inspect.isclass(build) and issubclass(build, nn.Module)):
                raise _unknown(config.net, "such as Unet, FPN or DeepLabV3Plus")
            known["encoder_weights"] = None
        case "torchvision":
            models = importlib.import_module(f"{_library(config.net).__name__}.models")
            listed = models.list_models(module=models.segmentation)
            if name not in listed:
                raise _unknown(config.net, ", ".join(listed))
            if config.num_channels != 3:
                raise ConfigError("Nets of torchvision take three channels: `model.num_channels`.")
            build = models.get_model_builder(name)
            known = {"weights": None, "weights_backbone": None, "num_classes": num_classes}
        case "timm":
            timm = _library(config.net)
            if not timm.is_model(name):
                near = timm.list_models(f"{name.partition('_')[0][:6]}*")[:5]
                raise _unknown(config.net, ", ".join(near) or "such as convnext_tiny")
            build = functools.partial(_timm_labeller, timm.create_model, name)
            known = {"num_channels": config.num_channels, "num_classes": num_classes}
        case _:
            build = import_net(config.net)
            if isinstance(build, nn.Module):
                raise ConfigError(f"`model.net` {config.net} is a net, not a function that builds.")
            has = inspect.signature(build).parameters
            told = {"num_classes": num_classes, "num_channels": config.num_channels}
            known = {k: v for k, v in told.items() if k in has}
    if library in LIBRARIES:
        _refuse_downloads(config)
    net = called(config.net, build, known | dict(config.arguments))
    if not isinstance(net, nn.Module):
        raise ConfigError(f"`model.net` {config.net} returns {type(net).__name__}, not a net.")
    if not any(p.requires_grad for p in net.parameters()):
        raise ConfigError(f"`model.net` {config.net} has no parameters: there is nothing to train.")
    return net


def _timm_labeller(
    create: Callable[..., nn.Module],
    name: str,
    *,
    num_channels: int,
    num_classes: int,
    **arguments: Any,  # noqa: ANN401
) -> nn.Module:
    body = create(name, num_classes=0, global_pool="", in_chans=num_channels, **arguments)
    return _TimmLabeller(body, num_channels, num_classes)


def _library(net: str) -> Any:  # noqa: ANN401
    module, package = LIBRARIES[net.partition(":")[0]]
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"`model.net` is {net}, which needs the package {package}: {error}. Run `pip install "
            f"{package}`."
        ) from error


def import_net(net: str) -> Any:  # noqa: ANN401
    """What `package.module:build` names; modules of the current folder are found as well.

    Raises:
        ConfigError: It cannot be imported, or is not callable.
    """
    module, _, name = net.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    except Exception as error:  # it is someone's own code
        raise ConfigError(
            f"{net} cannot be imported: {_said(error)}. Run from the folder that holds it, or "
            "install its package."
        ) from error
    if not callable(found):
        raise ConfigError(f"{net} is {type(found).__name__}, not a function that returns a net.")
    return found


def _unknown(net: str, known: str) -> ConfigError:
    library, _, name = net.partition(":")
    return ConfigError(f"`model.net` is {net}, but {library} has no net {name}. It has: {known}.")


def _refuse_downloads(config: ModelConfig) -> None:
    """Weights come through `train.weights`, so that a weights file needs no network later."""
    for key, value in config.arguments.items():
        loads = any(part in key for part in ("weights", "pretrained", "checkpoint", "cache"))
        if (loads and value) or (isinstance(value, str) and any(c in value for c in ":/\\")):
            raise ConfigError(
                f"`model.arguments.{key}` is {value!r}, which would load a file or download one. "
                "Leave it out, and set `train.weights` to a file of the library's weights."
            )


def called(name: str, build: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:  # noqa: ANN401
    """What someone's function gives.

    Raises:
        ConfigError: It fails.
    """
    try:
        return build(**arguments)
    except AnysizeError:
        raise
    except Exception as error:  # it is someone's own code
        given = ", ".join(f"{k}={v!r}" for k, v in arguments.items())
        raise ConfigError(f"{name} fails with ({given}): {_said(error)}.") from error


def _said(error: Exception) -> str:
    text = f"{type(error).__name__}: {str(error).strip().rstrip('.')}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    if place.filename in (__file__, functools.__file__) or place.filename.startswith("<"):
        return text
    return f"{text} ({Path(place.filename).name}, line {place.lineno})"


def _output_shape(
    net: nn.Module, num_channels: int, multiple: int = 1, pooled_norms: list[str] | None = None
) -> tuple[int, ...]:
    """Of one image; also names the batch norms that then see one cell."""

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            del module
            if pooled_norms is not None and inputs[0].shape[2:].numel() == 1:
                pooled_norms.append(name)

        return hook

    meta = copy.deepcopy(net).to("meta").eval()
    extent = round_up(_CHECKED_EXTENT, multiple)
    for name, module in meta.named_modules():
        if isinstance(module, _BatchNorm):
            module.register_forward_pre_hook(note(name))
    with torch.no_grad():
        y = meta(torch.empty(1, num_channels, extent, extent, device="meta"))
    return tuple(chosen_output(y, None).shape)


@contextlib.contextmanager
def _initial_weights_of(generator: torch.Generator | None) -> Iterator[None]:
    """Nets of others draw from PyTorch's own generator, which is put back afterwards."""
    if generator is None:
        yield
        return
    with torch.random.fork_rng():
        torch.manual_seed(generator.initial_seed())  # noqa: TID251
        yield
