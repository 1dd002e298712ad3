"""A small net and smooth images, for tests of prediction."""

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from anysize.config import ModelConfig, PixelConvention
from anysize.data.samples import Classes
from anysize.models.build import build_model
from anysize.models.weights_file import Weights

COLOURS = ((10, 20, 30), (200, 0, 0), (0, 180, 90))
CLASSES = Classes(names=("sea", "land", "lake"), colours=COLOURS, ignore_index=255)


def tiny_model(**settings):
    """A net whose logits are a few units large, so that probabilities are not all 0 and 1."""
    config = ModelConfig(units=(1, 1, 1, 1), base_depth=8, **settings)
    model = build_model(config, 3, generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        model.head.weights.mul_(0.02)
    return model, config


def tiny_weights(kind="multiclass"):
    model, config = tiny_model()
    return Weights(model=model, config=config, classes=CLASSES, pixels=PixelConvention(), kind=kind)


def image_of(height, width, seed=0):
    """Smooth blobs, so that neighbouring labels agree and classes differ."""
    rng = np.random.default_rng(seed)
    coarse = torch.from_numpy(rng.uniform(0, 255, (1, 3, height // 9 + 2, width // 9 + 2)))
    image = F.interpolate(coarse, (height, width), mode="bilinear", align_corners=False)
    return image[0].permute(1, 2, 0).numpy().astype(np.uint8)


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return path
