"""Label Studio's brush masks are refused by name, with what to do."""

import pytest
from PIL import Image

from anysize.config import DataConfig
from anysize.data.samples import read_folder
from anysize.errors import DataError


def test_brush_masks_are_named_with_the_way_out(tmp_path):
    for folder, name in (
        ("images", "a.png"),
        ("masks", "task-7-annotation-3-by-1-tag-sea lion-0.png"),
    ):
        (tmp_path / folder).mkdir()
        Image.new("L", (8, 6)).save(tmp_path / folder / name)
    tables = (f'[[class]]\nname = "{n}"\ncolour = [{i}, 0, 0]\n' for i, n in enumerate("ab"))
    (tmp_path / "classes.toml").write_text("".join(tables))
    says = r"brush mask of Label Studio, named by its task \(7\) and label \(sea lion\)"
    with pytest.raises(DataError, match=says):
        read_folder(tmp_path, DataConfig(root=""), "multiclass")
