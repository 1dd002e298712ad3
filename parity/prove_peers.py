"""Proves nets of torchvision, segmentation-models-pytorch and timm; writes docs/nets.md.

    python -m parity.prove_peers docs/nets.md [part of a name ...]

Exits with 1 where a net is neither exact nor refused by name. With names, only those nets are
proven, and the table is printed.
"""

import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import parity.torchvision_on_cpu  # noqa: F401  # before torchvision
import segmentation_models_pytorch as smp
import timm
import torch
from torch import nn

from anysize.errors import UnsupportedNetError
from anysize.models.prove import Proof, prove

SIZES = [(64, 96), (70, 51)]
LARGE_SIZES = [(128, 160), (140, 190)]
NEEDS_LARGE = (" PAN ", "densenet", "Unet efficientnet")
"""PAN halves cells of 16 pixels three times more. The last norms of the others would have
statistics of six cells, some all but equal: float64 has no digits left of such a variance."""
SEGMENTATION = (
    "fcn_resnet50",
    "fcn_resnet101",
    "deeplabv3_resnet50",
    "deeplabv3_resnet101",
    "deeplabv3_mobilenet_v3_large",
    "lraspp_mobilenet_v3_large",
)
DECODERS = (
    "Unet",
    "UnetPlusPlus",
    "MAnet",
    "Linknet",
    "FPN",
    "PSPNet",
    "DeepLabV3",
    "DeepLabV3Plus",
    "PAN",
    "UPerNet",
    "Segformer",
)
ENCODERS = ("resnet34", "efficientnet-b0", "mobilenet_v2")
FAMILIES = (
    "resnet18d",
    "resnext50_32x4d",
    "seresnet50",
    "efficientnet_b0",
    "efficientnetv2_rw_t",
    "regnety_002",
    "mobilenetv3_small_100",
    "mobilenetv4_conv_small",
    "convnext_atto",
    "convnextv2_atto",
    "densenet121",
    "hrnet_w18_small",
    "res2net50_26w_4s",
    "dla34",
)


def nets() -> dict[str, Callable[[], nn.Module]]:
    from torchvision.models import segmentation

    plain = {"weights": None, "weights_backbone": None, "num_classes": 5}
    found: dict[str, Callable[[], nn.Module]] = {}
    for name in SEGMENTATION:
        found[f"torchvision {name}"] = functools.partial(getattr(segmentation, name), **plain)
    for decoder in DECODERS:
        for encoder in ENCODERS:
            build = functools.partial(
                getattr(smp, decoder), encoder, encoder_weights=None, classes=4
            )
            found[f"smp {decoder} {encoder}"] = build
    for name in FAMILIES:
        found[f"timm {name}"] = functools.partial(timm.create_model, name, num_classes=7)
    # Its classifier is chosen by the image's size; the rest of it is what people use.
    found["timm vgg11_bn (features)"] = functools.partial(
        timm.create_model, "vgg11_bn", features_only=True, out_indices=(4,)
    )
    return found


def row(name: str, build: Callable[[], nn.Module]) -> tuple[str, bool]:
    """A line of the table, and whether the net is exact or refused."""
    started = time.perf_counter()
    sizes = LARGE_SIZES if any(part in name for part in NEEDS_LARGE) else SIZES
    try:
        proof = prove(build(), sizes, output=0 if "features" in name else None)
    except UnsupportedNetError as error:
        if str(error).startswith("The net fails on images"):
            return f"| {name} | FAILED: {error} | | |", False
        return f"| {name} | refused: {str(error).split('. On a canvas')[0]} | | |", True
    except Exception as error:  # noqa: BLE001  # a peer may fail in any way; that is a finding
        return f"| {name} | FAILED: {type(error).__name__}: {error} | | |", False
    print(f"{name}: {proof.summary} {time.perf_counter() - started:.0f} s", flush=True)
    return _described(name, proof), proof.exact


def _described(name: str, proof: Proof) -> str:
    worst = max(max(c.outputs, c.gradients) for c in proof.comparisons)
    places = "mosaic" if proof.geometry.mosaic else "one per slot"
    verdict = "exact" if proof.exact else f"NOT EXACT: {proof.summary}"
    return (
        f"| {name} | {verdict}, {worst:.0e} | {places}, multiples of "
        f"{proof.geometry.size_multiple} | {proof.control.outputs:.0%} |"
    )


def main(path: Path, parts: list[str]) -> int:
    torch.set_num_threads(1)
    chosen = {n: b for n, b in nets().items() if not parts or any(p in n for p in parts)}
    rows = [row(name, build) for name, build in chosen.items()]
    text = "\n".join(
        (
            "# Nets that were proven",
            "",
            "Written by `make prove-peers`. Outputs and gradients in float64, in evaluation and",
            "training mode, padded batch and (where allowed) mosaic, against each image alone. The",
            "last column is what padding without masks is off by.",
            "",
            "| net | proof, largest difference | images | without masks |",
            "|---|---|---|---|",
            *(line for line, _ in rows),
            "",
        )
    )
    if parts:
        print(text)
    else:
        path.write_text(text)
    return 0 if all(fine for _, fine in rows) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
