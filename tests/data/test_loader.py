import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from anysize.config import AugmentConfig, PixelConvention
from anysize.data import loader
from anysize.data.loader import LoadedStep, load_steps, normalise
from anysize.data.samples import Classes, Sample, decode_image, decode_mask, find_samples
from anysize.data.transforms import Draw, draw, no_augmentation
from anysize.errors import DataError, DeviceError
from anysize.geometry import (
    Canvas,
    Layout,
    NetGeometry,
    Size,
    check_layout,
    grid_centres,
    padded_batch,
    place,
    single,
    target_canvas,
    target_rect,
)
from anysize.planning.packing import Pass, Step

GEOMETRY = NetGeometry(output_stride=16, pool_padding="same")
SIZES = [(33, 47), (20, 61), (50, 18), (17, 17), (40, 40)]
MakeFolder = Callable[..., Path]


def steps_for(draws: list[Draw]) -> list[Step]:
    """Two steps: a mosaic of images 2 and 0 with a padded batch of 3 and 1, then image 4 alone."""
    sizes = [d.out_size for d in draws]
    mosaic = Layout(
        Canvas(1, 112, 256),
        (
            place(sizes[2], GEOMETRY, slot=0, cell_top=0, cell_left=0),
            place(sizes[0], GEOMETRY, slot=0, cell_top=0, cell_left=8),
        ),
    )
    check_layout(mosaic, GEOMETRY)
    batch = padded_batch([sizes[3], sizes[1]], Canvas(3, 112, 128), GEOMETRY)
    return [
        Step((Pass(mosaic, (2, 0)), Pass(batch, (3, 1)))),
        Step((Pass(single(sizes[4], GEOMETRY), (4,)),)),
    ]


def load(
    samples: list[Sample],
    classes: Classes,
    draws: list[Draw] | None = None,
    steps: list[Step] | None = None,
    **changes: object,
) -> list[LoadedStep]:
    draws = draws or [no_augmentation(s.size) for s in samples]
    settings: dict = {
        "classes": classes,
        "geometry": GEOMETRY,
        "loss_at": "full",
        "pixels": PixelConvention(),
        "num_threads": 2,
        "prefetch_steps": 1,
    }
    return list(load_steps(samples, steps or steps_for(draws), draws, **(settings | changes)))


def singles(samples: list[Sample]) -> list[Step]:
    return [Step((Pass(single(s.size, GEOMETRY), (i,)),)) for i, s in enumerate(samples)]


def loader_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("anysize-loader")]


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
@pytest.mark.parametrize("loss_at", ["full", "grid"])
def test_batches_do_not_depend_on_the_number_of_threads(make_folder, classes, kind, loss_at):
    samples = find_samples(make_folder(SIZES, kind=kind), classes, kind)
    config = AugmentConfig(
        min_scale=0.5, max_scale=1.5, brightness=0.3, contrast=0.3, saturation=0.3
    )
    draws = [draw(config, s.size, seed=0, epoch=2, index=i) for i, s in enumerate(samples)]
    one, four = (
        load(samples, classes, draws, loss_at=loss_at, num_threads=n, prefetch_steps=n)
        for n in (1, 4)
    )
    for a, b in zip(one, four, strict=True):
        for batch_a, batch_b in zip(a.batches, b.batches, strict=True):
            assert batch_a.stems == batch_b.stems
            assert torch.equal(batch_a.pixels, batch_b.pixels)
            assert torch.equal(batch_a.target, batch_b.target)


def test_pixels_lie_at_their_placement_and_are_zero_elsewhere(make_folder, classes):
    samples = find_samples(make_folder(SIZES), classes, "multiclass")
    by_stem = {s.stem: s for s in samples}
    stems = []
    for step in load(samples, classes):
        for batch in step.batches:
            stems.append(batch.stems)
            canvas = batch.layout.canvas
            assert batch.pixels.shape == (canvas.slots, 3, canvas.height, canvas.width)
            assert batch.pixels.dtype == torch.float32
            assert batch.pixels.is_contiguous(memory_format=torch.channels_last)
            rest = batch.pixels.numpy().copy()
            for p, stem in zip(batch.layout.placements, batch.stems, strict=True):
                there = (p.slot, slice(None), slice(p.top, p.top + p.height))
                there = (*there, slice(p.left, p.left + p.width))
                expected = normalise(decode_image(by_stem[stem].image), PixelConvention())
                np.testing.assert_array_equal(rest[there], expected.transpose(2, 0, 1))
                rest[there] = 0
            assert not rest.any()
    assert stems == [("s2", "s0"), ("s3", "s1"), ("s4",)]


@pytest.mark.parametrize("kind", ["multiclass", "multilabel"])
@pytest.mark.parametrize("loss_at", ["full", "grid"])
def test_labels_lie_at_their_rectangle_and_are_ignored_elsewhere(
    make_folder, classes, kind, loss_at
):
    classes = dataclasses.replace(classes, ignore_index=254)
    root = make_folder(SIZES, kind=kind)
    for path in (root / "masks").rglob("*.png"):
        values = np.array(Image.open(path))
        Image.fromarray(np.where(values == 255, np.uint8(254), values)).save(path)
    samples = find_samples(root, classes, kind)
    by_stem = {s.stem: s for s in samples}
    for step in load(samples, classes, loss_at=loss_at):
        for batch in step.batches:
            canvas = target_canvas(batch.layout.canvas, GEOMETRY, loss_at)
            if kind == "multiclass":
                assert batch.target.shape == canvas
            else:
                assert batch.target.shape == (canvas.slots, 3, canvas.height, canvas.width)
            assert batch.target.dtype == torch.uint8
            rest = batch.target.numpy().copy()
            for p, stem in zip(batch.layout.placements, batch.stems, strict=True):
                r = target_rect(p, GEOMETRY, loss_at)
                labels = decode_mask(by_stem[stem], classes)
                if loss_at == "grid":
                    labels = labels[..., grid_centres(p.height, GEOMETRY), :]
                    labels = labels[..., grid_centres(p.width, GEOMETRY)]
                rows, columns = slice(r.top, r.top + r.height), slice(r.left, r.left + r.width)
                there = (r.slot, ..., rows, columns)
                np.testing.assert_array_equal(rest[there], labels)
                rest[there] = 254
            assert (rest == 254).all()


def test_a_draw_reaches_pixels_and_labels(make_folder, classes):
    samples = find_samples(make_folder([(33, 47)]), classes, "multiclass")
    mirrored = dataclasses.replace(no_augmentation(samples[0].size), mirror=True)
    steps = singles(samples)
    (plain,), (turned,) = (
        load(samples, classes, [d], steps)[0].batches
        for d in (no_augmentation(samples[0].size), mirrored)
    )
    p = plain.layout.placements[0]
    columns = slice(p.left, p.left + p.width)
    assert torch.equal(turned.pixels[..., columns], plain.pixels[..., columns].flip(-1))
    assert torch.equal(turned.target[..., :47], plain.target[..., :47].flip(-1))
    assert not torch.equal(turned.target, plain.target)


def test_pixel_conventions():
    image = np.array([[[255, 51, 0]]], np.uint8)
    slim = np.float32([255, 51, 0]) - np.float32([123.68, 116.779, 103.939])
    np.testing.assert_array_equal(normalise(image, PixelConvention()), slim[None, None])
    torchvision = PixelConvention(max_value=1.0, mean=(0.5, 0.25, 0.0), std=(0.5, 0.25, 0.1))
    np.testing.assert_allclose(
        normalise(image, torchvision), [[[1.0, -0.2, 0.0]]], rtol=1e-6, atol=1e-6
    )
    caffe = PixelConvention(channel_order="BGR", mean=(1.0, 2.0, 3.0))
    np.testing.assert_array_equal(normalise(image, caffe), [[[-1.0, 49.0, 252.0]]])


def test_a_resumed_epoch_starts_at_its_step(make_folder, classes):
    samples = find_samples(make_folder(SIZES), classes, "multiclass")
    steps = singles(samples)
    whole = load(samples, classes, steps=steps)
    rest = load(samples, classes, steps=steps, start=3)
    assert [s.batches[0].stems for s in rest] == [("s3",), ("s4",)]
    assert torch.equal(rest[0].batches[0].pixels, whole[3].batches[0].pixels)
    assert load(samples, classes, steps=steps, start=5) == []


def test_a_fault_is_raised_when_its_step_is_due_and_names_the_file(make_folder, classes):
    samples = find_samples(make_folder(SIZES), classes, "multiclass")
    samples[2].image.write_bytes(samples[2].image.read_bytes()[:300])
    steps = load_steps(
        samples,
        singles(samples),
        [no_augmentation(s.size) for s in samples],
        classes=classes,
        geometry=GEOMETRY,
        loss_at="full",
        pixels=PixelConvention(),
        num_threads=4,
        prefetch_steps=4,
    )
    assert [next(steps).batches[0].stems for _ in range(2)] == [("s0",), ("s1",)]
    with pytest.raises(DataError, match=f"{samples[2].image} cannot be decoded"):
        next(steps)
    assert not loader_threads()


def test_a_mask_fault_names_the_file(make_folder, classes):
    samples = find_samples(make_folder([(9, 9)]), classes, "multiclass")
    Image.new("L", (9, 9), 7).save(samples[0].masks[0])
    with pytest.raises(DataError, match=f"{samples[0].masks[0]} holds values"):
        load(samples, classes, steps=singles(samples))


def test_an_image_that_changed_its_size_is_named(make_folder, classes):
    samples = find_samples(make_folder([(9, 9)]), classes, "multiclass")
    Image.new("RGB", (9, 8)).save(samples[0].image)
    with pytest.raises(DataError, match=f"{samples[0].image} is 8x9, but was 9x9"):
        load(samples, classes, steps=singles(samples))


def test_any_other_error_notes_the_file(make_folder, classes, monkeypatch):
    samples = find_samples(make_folder([(9, 9)]), classes, "multiclass")

    def fail(path, *_):
        raise error

    monkeypatch.setattr(loader, "decode_image", fail)
    error = RecursionError()
    with pytest.raises(RecursionError) as caught:
        load(samples, classes, steps=singles(samples))
    assert caught.value.__notes__ == [f"while loading {samples[0].image}"]
    error = MemoryError()
    with pytest.raises(DeviceError, match=r"Memory ran out while loading .*s0\.png \(9x9\)"):
        load(samples, classes, steps=singles(samples), skip_broken=True)


def test_a_draw_that_does_not_fit_its_placement_is_our_bug(make_folder, classes):
    samples = find_samples(make_folder([(9, 9)]), classes, "multiclass")
    with pytest.raises(AssertionError, match="s0 is placed as 9x9, but drawn as 8x9"):
        load(samples, classes, [no_augmentation(Size(8, 9))], singles(samples))


def one_by_one(samples: list[Sample], classes: Classes, prefetch_steps: int):
    return load_steps(
        samples,
        singles(samples),
        [no_augmentation(s.size) for s in samples],
        classes=classes,
        geometry=GEOMETRY,
        loss_at="grid",
        pixels=PixelConvention(),
        num_threads=1,
        prefetch_steps=prefetch_steps,
    )


def test_steps_are_made_ahead_within_bounds(make_folder, classes, monkeypatch):
    samples = find_samples(make_folder([(9, 9)] * 5), classes, "multiclass")
    decoded = threading.Semaphore(0)
    num_submitted = 0

    class Pool(ThreadPoolExecutor):
        def submit(self, *args):
            nonlocal num_submitted
            num_submitted += 1
            return super().submit(*args)

    def count(path, *_):
        decoded.release()
        return decode_image(path)

    monkeypatch.setattr(loader, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(loader, "decode_image", count)
    steps = one_by_one(samples, classes, prefetch_steps=2)
    next(steps)
    for _ in range(3):  # the step that we hold, and two ahead of it, before we ask for them
        assert decoded.acquire(timeout=30)
    assert num_submitted == 3
    next(steps)
    assert num_submitted == 4
    assert len(list(steps)) == 3
    assert num_submitted == 5


def test_the_wait_is_measured(make_folder, classes, monkeypatch):
    samples = find_samples(make_folder([(9, 9)] * 2), classes, "multiclass")
    clock = iter([10.0, 10.5, 20.0, 22.0, 30.0])
    monkeypatch.setattr(loader, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    may_decode = threading.Semaphore(0)
    finish = loader._finish

    def decode_when_due(path, *_):
        assert may_decode.acquire(timeout=60)
        return decode_image(path)

    def finish_when_due(*arguments, **options):
        may_decode.release()
        return finish(*arguments, **options)

    monkeypatch.setattr(loader, "decode_image", decode_when_due)
    monkeypatch.setattr(loader, "_finish", finish_when_due)
    steps = one_by_one(samples, classes, prefetch_steps=1)
    assert [step.wait_s for step in steps] == [0.5, 2.0]


@pytest.mark.parametrize("end", ["close", "interrupt"])
def test_threads_end_with_the_iterator(make_folder, classes, end):
    samples = find_samples(make_folder([(9, 9)] * 5), classes, "multiclass")
    steps = one_by_one(samples, classes, prefetch_steps=2)
    next(steps)
    assert loader_threads()
    if end == "close":
        steps.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            steps.throw(KeyboardInterrupt())
    assert not loader_threads()


def test_what_has_not_begun_is_dropped_at_the_end(make_folder, classes, monkeypatch):
    samples = find_samples(make_folder([(9, 9)] * 10), classes, "multiclass")
    second_began, may_go_on = threading.Event(), threading.Event()
    begun = []

    def hold(path, *_):
        begun.append(path.stem)
        if path.stem == "s1":
            second_began.set()
            assert may_go_on.wait(timeout=30)
        return decode_image(path)

    class Pool(ThreadPoolExecutor):
        def shutdown(self, wait=True, *, cancel_futures=False):
            super().shutdown(wait=False, cancel_futures=cancel_futures)
            may_go_on.set()
            super().shutdown(wait=wait)

    monkeypatch.setattr(loader, "ThreadPoolExecutor", Pool)
    monkeypatch.setattr(loader, "decode_image", hold)
    steps = one_by_one(samples, classes, prefetch_steps=8)
    next(steps)
    assert second_began.wait(timeout=30)
    steps.close()
    assert begun == ["s0", "s1"]
