"""Cityscapes with masks of train ids in one split, or in both."""

import numpy as np
import pytest
from PIL import Image

from anysize.config import DataConfig
from anysize.data.masks import decode_mask
from anysize.data.samples import read_folder

TRAIN_IDS = np.arange(48).reshape(6, 8) % 3
IDS = np.array([7, 8, 11])[TRAIN_IDS]


@pytest.mark.parametrize(
    ("with_train_ids", "taken"),
    [((), "labelIds"), (("val",), "labelIds"), (("train", "val"), "labelTrainIds")],
)
def test_both_splits_are_read_from_masks_of_one_kind(tmp_path, with_train_ids, taken):
    for split in ("train", "val"):
        stem = f"{split}/ulm/ulm_000000_000019"
        for part in ("leftImg8bit", "gtFine"):
            (tmp_path / part / split / "ulm").mkdir(parents=True)
        Image.new("RGB", (8, 6)).save(tmp_path / f"leftImg8bit/{stem}_leftImg8bit.png")
        masks = {"labelIds": IDS} | (
            {"labelTrainIds": TRAIN_IDS} if split in with_train_ids else {}
        )
        for name, values in masks.items():
            picture = Image.fromarray(values.astype(np.uint8))
            picture.save(tmp_path / f"gtFine/{stem}_gtFine_{name}.png")
    folder = read_folder(tmp_path, DataConfig(root=""), "multiclass")
    assert len(folder.samples) == 2
    assert f"*_{taken}.png" in folder.description
    for sample in folder.samples:
        np.testing.assert_array_equal(decode_mask(sample, folder.classes), TRAIN_IDS)
