import importlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from rich.console import Console

from anysize import demo
from anysize.config import load_config
from anysize.demo import (
    LAKE,
    LAND,
    SEA,
    Crop,
    World,
    area_vote,
    colour_lookup_baseline,
    draw_crops,
    majority_of_colours,
    prepare_data,
    read_split,
    read_world,
    run_demo,
    side_by_side,
    write_run_toml,
)
from anysize.errors import DataError
from anysize.geometry import Canvas, NetGeometry, Size
from anysize.planning.canvases import Plan, write_plan

COLOUR_OF = np.array([(10, 20, 90), (90, 80, 30), (5, 5, 5)], np.uint8)


@pytest.fixture(scope="session")
def real_world():
    return read_world()


def pixel(world, north, east):
    row, column = int((90 - north) * 30), int((east + 180) * 30)
    return world.mask[row, column], world.image[row, column].astype(int)


@pytest.mark.parametrize(
    ("north", "east", "label"),
    [
        (30, -40, SEA),  # Atlantic
        (-40, 100, SEA),  # Indian Ocean
        (50, 10, LAND),  # Germany
        (-25, 135, LAND),  # Australia
        (47.7, -87.5, LAKE),  # Superior
        (-1, 33, LAKE),  # Victoria
        (53.3, 108, LAKE),  # Baikal
    ],
)
def test_mask_is_the_right_way_up(real_world, north, east, label):
    assert pixel(real_world, north, east)[0] == label


def test_picture_lies_under_the_mask(real_world):
    sea = pixel(real_world, 30, -40)[1]
    sahara = pixel(real_world, 24, 5)[1]
    assert sea[2] > sea[0]
    assert sahara[0] > sahara[2] + 40


def test_mask_and_picture_are_not_a_pixel_apart(real_world):
    # Over water blue is the strongest; the agreement must be best without a shift.
    rows = slice(1200, 4200)
    image = real_world.image[rows, ::7].astype(int)
    is_blue = image[..., 2] > image[..., 0] + 8
    agreement = {
        (down, right): (
            is_blue == (np.roll(real_world.mask, (down, right), (0, 1))[rows, ::7] == SEA)
        ).mean()
        for down in (-1, 0, 1)
        for right in (-1, 0, 1)
    }
    assert max(agreement, key=agreement.get) == (0, 0)


def test_missing_package_says_what_to_install(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(DataError, match=r'pip install "anysize\[demo\]"'):
        read_world()


def test_area_vote_by_hand():
    # Three cells onto two pixels: the middle one counts for both with half its area.
    mask = np.array([[1, 0, 0], [1, 0, 0], [1, 2, 2]], np.uint8)
    assert area_vote(mask, Size(2, 2), num_classes=3).tolist() == [[1, 0], [1, 2]]
    # A tie goes to the lower class.
    assert area_vote(np.array([[2, 1]], np.uint8), Size(1, 1), num_classes=3).tolist() == [[1]]


@given(st.data(), st.integers(1, 9), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_area_vote_counts_areas(data, height, width, seed):
    size = Size(data.draw(st.integers(1, height)), data.draw(st.integers(1, width)))
    mask = np.random.default_rng(seed).integers(3, size=(height, width), dtype=np.uint8)
    # Repeated so often that every pixel holds whole cells.
    fine = mask.repeat(size.height, 0).repeat(size.width, 1)
    blocks = fine.reshape(size.height, height, size.width, width)
    areas = [(blocks == k).sum((1, 3)) for k in range(3)]
    assert (area_vote(mask, size, num_classes=3) == np.argmax(areas, 0)).all()


@pytest.fixture
def striped_mask(monkeypatch):
    """A small world: stripes of sea and land from north to south, lakes in some stripes of land."""
    monkeypatch.setattr(demo, "PIXELS_A_DEGREE", 6)
    monkeypatch.setattr(demo, "CROP_PIXELS", (1500, 3000))
    mask = np.full((1080, 2160), SEA, np.uint8)
    stripes = mask.reshape(1080, 72, 30)
    stripes[:, 1::2] = LAND
    stripes[::10, 1::8, 10:20] = LAKE
    return mask


def test_crops_keep_to_their_longitudes_and_differ_in_size(striped_mask):
    used = {Size(1, 1)}
    degrees = ((-100, -50), (60, 110))
    crops = draw_crops(striped_mask, degrees, 80, used, np.random.default_rng(1))
    assert len(crops) == 80
    assert len({c.size for c in crops}) == 80
    assert used == {Size(1, 1), *(c.size for c in crops)}
    for crop in crops:
        assert 1400 < crop.size.pixels < 3100
        assert 0.49 < crop.size.height / crop.size.width < 2.05
        assert crop.top >= 25 * 6
        assert crop.top + crop.size.height <= 150 * 6
    edges = [(c.left, c.left + c.size.width) for c in crops]
    in_first = sum(left >= 80 * 6 and right <= 130 * 6 for left, right in edges)
    in_second = sum(left >= 240 * 6 and right <= 290 * 6 for left, right in edges)
    assert in_first > 20
    assert in_second > 20
    assert in_first + in_second == 80


def test_no_crop_is_all_sea(striped_mask):
    mask = np.full_like(striped_mask, SEA)
    mask[400:404, 400:404] = LAKE
    mask[404:420, 400:450] = LAND
    for crop in draw_crops(mask, ((-180, 0),), 10, set(), np.random.default_rng(0)):
        window = mask[crop.top : crop.top + crop.size.height, crop.left :][:, : crop.size.width]
        assert (window != SEA).mean() >= 0.02


def test_some_crops_are_drawn_around_lakes(striped_mask):
    mask = np.full_like(striped_mask, LAND)
    mask[600:602, 600:602] = LAKE
    crops = draw_crops(mask, ((-180, 180),), 60, set(), np.random.default_rng(0))
    with_lake = [
        c
        for c in crops
        if (mask[c.top : c.top + c.size.height, c.left :][:, : c.size.width] == LAKE).any()
    ]
    assert 0.15 < len(with_lake) / len(crops) < 0.5


def test_stem_says_where_a_crop_is():
    assert Crop(top=0, left=0, size=Size(30, 30)).stem == "90N_180W"
    assert Crop(top=3000, left=6000, size=Size(300, 600)).stem == "15S_030E"


@pytest.fixture
def small_world(monkeypatch, striped_mask):
    world = World(COLOUR_OF[striped_mask], striped_mask)
    monkeypatch.setattr(demo, "read_world", lambda: world)


@pytest.fixture
def data(tmp_path, small_world):
    prepare_data(tmp_path / "data", num_images=10)
    return tmp_path / "data"


def test_data_folder_holds_what_the_world_holds(data):
    classes, train, test = read_split(data)
    assert classes.names == ("sea", "land", "lake")
    assert (len(train), len(test)) == (7, 2)
    assert (data / "val.txt").read_text().startswith("train_000")
    for sample in (*train, *test):
        image = np.asarray(Image.open(sample.image))
        mask = np.asarray(Image.open(sample.masks[0]))
        assert (image == COLOUR_OF[mask]).all()
        assert image.shape[:2] == sample.size


def test_data_depend_on_the_seed_alone(tmp_path, data):
    calls = []
    prepare_data(tmp_path / "same", num_images=10, progress=lambda *c: calls.append(c))
    prepare_data(tmp_path / "other", num_images=10, seed=1)
    read = {
        root: {p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()}
        for root in (data, tmp_path / "same", tmp_path / "other")
    }
    assert len(read[data]) == 24
    assert read[data] == read[tmp_path / "same"]
    assert read[data].keys() != read[tmp_path / "other"].keys()
    assert calls == [(i, 10) for i in range(1, 11)]


def test_data_folder_appears_whole_or_not_at_all(tmp_path, small_world):
    def interrupt(done, total):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_data(tmp_path / "data", num_images=10, progress=interrupt)
    assert list(tmp_path.iterdir()) == []


def test_data_folder_is_not_overwritten(data):
    with pytest.raises(DataError, match=f"{data} exists already"):
        prepare_data(data, num_images=10)


def test_majority_of_colours_and_of_the_colours_around():
    counts = np.zeros((64, 3), np.int64)  # Two bits a channel: code = 16 r + 4 g + b.
    counts[0b000000] = (5, 2, 0)
    counts[0b000001] = (0, 1, 4)
    counts[0b110000] = (0, 9, 0)
    labels = majority_of_colours(counts)
    assert labels[0b000000] == 0
    assert labels[0b000001] == 2
    # Not seen; of the coarse colour around it 5 pixels are class 0, 3 class 1 and 4 class 2.
    assert labels[0b000101] == 0
    # Nor is its coarse colour seen; class 1 is the most frequent over all.
    assert labels[0b001111] == 1
    assert labels.shape == (64,)


def test_colour_lookup_is_perfect_where_colour_says_it_all(data):
    result = colour_lookup_baseline(data)
    assert result["kind"] == "multiclass"
    assert result["num_images"] == 2
    assert result["iou"]["sea"] == result["iou"]["land"] == 1


def test_colour_lookup_learns_from_the_training_crops_only(data):
    _, train, val = read_split(data)
    for sample in train:
        mask = np.asarray(Image.open(sample.masks[0]))
        Image.fromarray(COLOUR_OF[[1, 0, 2]][mask]).save(sample.image)
    assert colour_lookup_baseline(data)["iou"]["sea"] == 0
    assert val


def test_side_by_side_shows_truth_and_prediction(data, tmp_path):
    classes, train, _ = read_split(data)
    all_lake = []
    for sample in train[:3]:
        all_lake.append(tmp_path / f"{sample.stem}.png")
        Image.fromarray(np.full(sample.size, LAKE, np.uint8)).save(all_lake[-1])
    side_by_side(train[:3], all_lake, classes, tmp_path / "wrong.png")
    side_by_side(train[:3], [s.masks[0] for s in train[:3]], classes, tmp_path / "right.png")

    def share(path, k):
        picture = np.asarray(Image.open(path).convert("RGB"))
        return (picture == classes.colours[k]).all(-1).mean()

    assert share(tmp_path / "right.png", SEA) > 0.01
    assert share(tmp_path / "right.png", SEA) > 1.5 * share(tmp_path / "wrong.png", SEA)
    assert share(tmp_path / "wrong.png", LAKE) > 3 * share(tmp_path / "right.png", LAKE)


def test_demo_settings_hold(tmp_path):
    write_run_toml(tmp_path / "run.toml")
    config = load_config(tmp_path / "run.toml")
    assert (config.data.train, config.data.val) == ("train.txt", "val.txt")
    # It starts afresh, and the picture's lakes are small.
    assert not config.train.weights
    assert config.model.output_stride == 8


@pytest.fixture
def quick_settings(monkeypatch, tmp_path):
    """A tiny net, one epoch, and a plan made by hand."""
    plan = Plan(
        geometry=NetGeometry(output_stride=8),
        images_per_step=4,
        max_pixels_per_step=1_048_576,
        canvases=(Canvas(1, 256, 256),),
    )
    write_plan(plan, tmp_path / "plan.json", sizes=[Size(40, 40)])
    quick = {
        "units": "[1, 1, 1, 1]",
        "base_depth": "4",
        "min_scale": "1.0",
        "max_scale": "1.0",
        "epochs": "1",
    }
    lines = demo.RUN_TOML.splitlines()
    for i, line in enumerate(lines):
        key = line.partition(" =")[0]
        if key in quick:
            lines[i] = f"{key} = {quick.pop(key)}"
    assert not quick
    lines.insert(lines.index("[plan]") + 1, 'file = "plan.json"')
    monkeypatch.setattr(demo, "RUN_TOML", "\n".join(lines))


def test_demo_from_start_to_pictures(tmp_path, data, quick_settings):
    lines = tmp_path / "console.txt"
    with lines.open("w") as file:
        result = run_demo(tmp_path, Console(file=file, width=100))
    printed = lines.read_text()
    assert "colour lookup" in printed
    assert "ratio" in printed
    assert result["baseline"]["iou"].keys() == result["net"]["iou"].keys()
    for name in ("predictions.png", "curves.png", "canvases.png", "run/report.html"):
        assert (tmp_path / name).stat().st_size > 5000
        assert name in printed
    assert len(list((tmp_path / "predictions" / "masks").iterdir())) == 2

    # A second call keeps the data and the run.
    weights = (tmp_path / "run" / "weights.safetensors").stat().st_mtime_ns
    with lines.open("w") as file:
        again = run_demo(tmp_path, Console(file=file, width=100))
    assert (tmp_path / "run" / "weights.safetensors").stat().st_mtime_ns == weights
    assert again["net"] == result["net"]
