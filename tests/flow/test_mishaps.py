"""Steps that go wrong: skipped, split, or with an image left out; and always said."""

import contextlib
import dataclasses
import json
import math
import signal

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from tests.flow.runs import assert_same_results, events_of, results, run, said

from anysize.config import ModelConfig, OptimConfig, PixelConvention
from anysize.data.loader import load_steps
from anysize.data.samples import find_samples, read_classes
from anysize.data.splitting import split_to_fit
from anysize.data.transforms import no_augmentation
from anysize.errors import DataError, DeviceError, StoppedByUserError, WeightsError
from anysize.geometry import Canvas, Layout, NetGeometry, check_layout, place
from anysize.models.build import build_model
from anysize.models.fcn import FCN
from anysize.planning.packing import Pass, Step
from anysize.training import evaluation, run_folder
from anysize.training import job as job_module
from anysize.training.losses import CrossEntropy, SigmoidCrossEntropy
from anysize.training.memory import PassLimit, Tally
from anysize.training.optim import build_optimizer
from anysize.training.state import load_latest_state
from anysize.training.step import train_step

GEOMETRY = NetGeometry(16)


class _NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * math.nan


def spoil(monkeypatch, how, stem):
    """Makes the loss or the gradient of every step with an image not finite."""
    real_step = job_module.train_step
    factor = {"nan": math.nan, "inf": math.inf, "gradient": 1.0}[how]

    class Spoilt(CrossEntropy):
        def sum(self, logits, batch):
            value = CrossEntropy.sum(self, logits, batch)
            return _NanGradient.apply(value) if how == "gradient" else value * factor

    def step(net, loss, batches, *args, **kwargs):
        loss = Spoilt() if any(stem in b.stems for b in batches) else loss
        return real_step(net, loss, batches, *args, **kwargs)

    monkeypatch.setattr(job_module, "train_step", step)


def states(monkeypatch):
    """Net and optimiser after each checkpoint, by step."""
    taken = {}
    real = run_folder.save_state

    def saving(*args, **kwargs):
        path = real(*args, **kwargs)
        taken[kwargs["step"]] = load_file(path)

    monkeypatch.setattr(run_folder, "save_state", saving)
    return taken


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@pytest.mark.parametrize("how", ["nan", "inf", "gradient"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_a_step_that_is_not_finite_changes_nothing_and_is_said(workspace, monkeypatch, how, kind):
    spoil(monkeypatch, how, "s05")
    taken = states(monkeypatch)
    settings = ("train.checkpoint_every=1", "train.log_every=1", f"optim.kind={kind}")
    text = said(workspace, *settings, "data.val_fraction=0.01", "train.epochs=2")
    skipped = events_of(workspace / "run", "skip")
    assert len(skipped) == 2  # Once an epoch.
    bad = {e["step"] for e in skipped}
    for step in range(1, max(taken) + 1):
        assert same(taken[step], taken[step - 1]) == (step in bad), step
    for event in skipped:
        assert "s05" in event["images"]
        assert event["in_a_row"] == 1
        assert f"step {event['step']} skipped: its loss or gradient is not finite; 1 in" in text
    assert "Steps skipped since their loss or gradient was not finite: 2 of 14" in text
    logged = events_of(workspace / "run", "train")
    assert {e["step"] for e in logged} == set(taken) - bad - {0}
    assert logged[-1]["skipped"] == 2
    assert "skipped 2" in text


def test_a_run_with_skipped_steps_resumes_bit_for_bit(workspace, monkeypatch):
    spoil(monkeypatch, "nan", "s05")
    whole = run(workspace, "train.run=whole", "data.val_fraction=0.01")
    for stop_after in (1, 5, 8, 13):
        calls = []
        real = job_module.train_step

        def stopped(*args, real=real, calls=calls, stop_after=stop_after, **kwargs):
            calls.append(1)
            if len(calls) == stop_after:
                signal.raise_signal(signal.SIGTERM)
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(job_module, "train_step", stopped)
            with pytest.raises(StoppedByUserError):
                run(workspace, f"train.run=p{stop_after}", "data.val_fraction=0.01")
        parts = run(workspace, f"train.run=p{stop_after}", "data.val_fraction=0.01", resume=True)
        assert_same_results(whole, parts)
        assert load_latest_state(parts / "checkpoints").tally["num_skipped"] == 2


def test_bad_steps_in_a_row_stop_the_run_and_their_images_are_saved(workspace, monkeypatch):
    whole = run(workspace, "train.run=whole")
    with monkeypatch.context() as patch:
        patch.setattr(CrossEntropy, "sum", lambda self, logits, batch: logits.sum() * math.nan)
        with pytest.raises(DataError, match=r"3 steps in a row, up to step 3.*bad-steps\.json"):
            run(workspace, "train.max_bad_steps=3")
    bad = json.loads((workspace / "run/bad-steps.json").read_text())
    assert [b["step"] for b in bad] == [1, 2, 3]
    assert len({name for b in bad for name in b["images"]}) == 6
    state = load_latest_state(workspace / "run/checkpoints")
    assert state.step == 3
    assert len(state.tally["bad_steps"]) == 3
    # The images are what they were: a run that goes on takes the next step, and one that is still
    # bad stops at once.
    with monkeypatch.context() as patch:
        patch.setattr(CrossEntropy, "sum", lambda self, logits, batch: logits.sum() * math.nan)
        with pytest.raises(DataError, match="4 steps in a row"):
            run(workspace, "train.max_bad_steps=3", resume=True)
    run(workspace, resume=True)
    with pytest.raises(AssertionError):
        assert_same_results(whole, workspace / "run")


def crowded_step(workspace, kind="multiclass"):
    """Four images in two slots of a canvas: two side by side, one above another one."""
    root = workspace / "data"
    classes = read_classes(root / "classes.toml")
    samples = find_samples(root, classes, kind)[::4]
    first, second, third, fourth = (s.size for s in samples)
    right = GEOMETRY.cells(first.width) + GEOMETRY.gutter_cells
    below = GEOMETRY.cells(third.height) + GEOMETRY.gutter_cells
    placements = (
        place(first, GEOMETRY, slot=0, cell_top=0, cell_left=0),
        place(second, GEOMETRY, slot=0, cell_top=0, cell_left=right),
        place(third, GEOMETRY, slot=1, cell_top=0, cell_left=0),
        place(fourth, GEOMETRY, slot=1, cell_top=below, cell_left=0),
    )
    layout = Layout(Canvas(2, 200, 200), placements)
    check_layout(layout, GEOMETRY)
    return samples, classes, Step((Pass(layout, (0, 1, 2, 3)),))


def loaded_step(samples, classes, step, loss_at, **options):
    (loaded,) = load_steps(
        samples,
        [step],
        [no_augmentation(s.size) for s in samples],
        classes=classes,
        geometry=GEOMETRY,
        loss_at=loss_at,
        pixels=PixelConvention(),
        num_threads=1,
        prefetch_steps=1,
        **options,
    )
    return loaded


def doubled(batches):
    return [dataclasses.replace(b, pixels=b.pixels.double()) for b in batches]


def parameters_after(loaded, batches, loss_at, *, norm="frozen", limit=None):
    """All state of a float64 net after a step."""
    config = ModelConfig(units=(1, 1, 1, 1), base_depth=4, loss_at=loss_at, norm=norm)
    model = build_model(config, 3, generator=torch.Generator().manual_seed(0)).double().train()
    optimizer = build_optimizer(model, OptimConfig(lr=1e-3, momentum=0.0))
    batches = doubled(batches)
    loss = train_step(model, CrossEntropy(), batches, optimizer, pass_limit=limit).loss
    state = torch.cat([t.detach().flatten() for t in model.state_dict().values()])
    return state, loss


def pass_limit():
    return PassLimit(tally=Tally(), ignore_index=255)


@contextlib.contextmanager
def memory_for(monkeypatch, pixels, error, where="forward"):
    """Lets the net fail above a number of canvas pixels; gives the sizes that were tried."""
    tried = []
    real = FCN.forward

    def forward(self, x, layout):
        tried.append(layout.canvas.pixels)
        too_large = layout.canvas.pixels > pixels
        if too_large and where == "forward":
            real(self, x, layout)  # Statistics and memory as if it had come far.
            raise error
        logits = real(self, x, layout)
        if too_large:

            def fail(_):
                raise error

            first = next(self.parameters())
            first.register_hook(fail)  # The last gradient of the backward pass.
        return logits

    with monkeypatch.context() as patch:
        patch.setattr(FCN, "forward", forward)
        yield tried


ERRORS = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "cpu": RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"),
    "numpy": MemoryError("Unable to allocate"),
    "onednn": RuntimeError("could not create a primitive"),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("loss_at", ["grid", "full"])
@pytest.mark.parametrize("pixels", [50_000, 30_000], ids=["slots", "images"])
def test_a_split_step_is_the_same_step(workspace, monkeypatch, error, loss_at, pixels):
    samples, classes, step = crowded_step(workspace)
    loaded = loaded_step(samples, classes, step, loss_at)
    whole, whole_loss = parameters_after(loaded, loaded.batches, loss_at)
    limit = pass_limit()
    with memory_for(monkeypatch, pixels, ERRORS[error]) as tried:
        split, loss = parameters_after(loaded, loaded.batches, loss_at, limit=limit)
    assert limit.tally.max_pass_pixels <= pixels
    assert max(tried[-2:]) <= pixels
    assert float(loss) == pytest.approx(float(whole_loss), rel=1e-12)
    torch.testing.assert_close(split, whole, rtol=1e-12, atol=1e-12)
    untrained = parameters_after(loaded, [], loss_at)[0]
    assert (split - untrained).abs().max() > 1e-6  # The control: a step was taken.


def test_what_was_added_before_memory_ran_out_does_not_count_twice(workspace, monkeypatch):
    samples, classes, step = crowded_step(workspace)
    loaded = loaded_step(samples, classes, step, "grid")
    parts = split_to_fit(loaded.batches, 50_000, 255)
    assert len(parts) == 2
    in_turn = [parts[0], *split_to_fit([parts[1]], 1, 255)]
    for norm in ("frozen", "trained"):
        expected, _ = parameters_after(loaded, in_turn, "grid", norm=norm)
        calls = []
        real = FCN.forward

        def forward(self, x, layout, real=real, calls=calls):
            calls.append(layout)
            if len(calls) == 2:
                real(self, x, layout)
                raise ERRORS["cpu"]
            return real(self, x, layout)

        with monkeypatch.context() as patch:
            patch.setattr(FCN, "forward", forward)
            limit = pass_limit()
            monkeypatch.setattr(
                PassLimit,
                "fitting",
                lambda self, batches, n=calls: batches if not n else doubled(in_turn),
            )
            got, _ = parameters_after(loaded, parts, "grid", norm=norm, limit=limit)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_other_errors_are_not_taken_for_a_lack_of_memory(workspace, monkeypatch):
    samples, classes, step = crowded_step(workspace)
    loaded = loaded_step(samples, classes, step, "grid")
    other = RuntimeError("shapes do not match")
    with (
        memory_for(monkeypatch, 50_000, other) as tried,
        pytest.raises(RuntimeError, match="do not match"),
    ):
        parameters_after(loaded, loaded.batches, "grid", limit=pass_limit())
    assert len(tried) == 1


def test_an_image_alone_that_does_not_fit_is_named_and_the_state_is_kept(workspace, monkeypatch):
    with (
        memory_for(monkeypatch, 3000, ERRORS["cpu"]),
        pytest.raises(DeviceError, match=r"Memory ran out on image s\d\d .*activation_checkpoint"),
    ):
        run(workspace, "train.epochs=1")
    state = load_latest_state(workspace / "run/checkpoints")
    assert state is not None
    run(workspace, "train.epochs=1", "model.activation_checkpointing=true", resume=True)


@pytest.mark.parametrize("norm", ["frozen", "trained"])
def test_the_budget_is_lowered_once_and_remembered(workspace, monkeypatch, norm):
    settings = (f"model.norm={norm}", "train.log_every=1")
    whole = run(workspace, "train.run=whole", *settings)
    with memory_for(monkeypatch, 15_000, ERRORS["gpu"]) as tried:
        text = said(workspace, *settings)
    large = [i for i, pixels in enumerate(tried) if pixels > 15_000]
    assert len(large) == 1
    assert text.count("Memory ran out in step") == 1
    phrase = "the result is the same" if norm == "frozen" else "statistics are now of smaller"
    assert phrase in text
    (event,) = events_of(workspace / "run", "memory")
    assert event["max_pass_pixels"] == 10_400
    losses = [[e["loss"] for e in events_of(workspace / f, "train")] for f in ("whole", "run")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4 if norm == "frozen" else 1)
    assert results(whole)["evaluations"][-1]["step"] == 12
    with memory_for(monkeypatch, 15_000, ERRORS["gpu"]) as tried:
        run(workspace, *settings, "train.epochs=3", "optim.schedule=poly", resume=True)
    assert tried
    assert max(tried) <= 15_000


def test_the_lowered_budget_is_in_a_checkpoint_at_once(workspace, monkeypatch):
    taken = []
    real = run_folder.save_state

    def saving(*args, **kwargs):
        taken.append((kwargs["step"], kwargs["tally"]["max_pass_pixels"]))
        return real(*args, **kwargs)

    monkeypatch.setattr(run_folder, "save_state", saving)
    with memory_for(monkeypatch, 15_000, ERRORS["gpu"]):
        run(workspace, "model.norm=frozen")
    (event,) = events_of(workspace / "run", "memory")
    assert taken[0] == (0, None)
    assert taken[1] == (event["step"], event["max_pass_pixels"])


def test_memory_that_runs_out_elsewhere_is_a_message(workspace, monkeypatch):
    def update(*_):
        raise ERRORS["cpu"]

    monkeypatch.setattr(torch.optim.AdamW, "step", update)
    with pytest.raises(DeviceError, match="outside of a training pass.*--resume"):
        run(workspace)


def test_an_evaluation_that_memory_does_not_hold_runs_on_smaller_canvases(workspace, monkeypatch):
    whole = run(workspace, "train.run=whole", "train.epochs=1", "model.norm=frozen")
    real = evaluation.evaluate
    plans = []

    def scarce(*args, plan, **kwargs):
        plans.append(plan.canvases)
        if any(c.pixels > 15_000 for c in plan.canvases):
            raise ERRORS["gpu"]
        return real(*args, plan=plan, **kwargs)

    monkeypatch.setattr(evaluation, "evaluate", scarce)
    text = said(workspace, "train.epochs=1", "model.norm=frozen")
    assert "Memory ran out in the evaluation" in text
    assert len(plans) == 2
    assert results(whole)["evaluations"] == results(workspace / "run")["evaluations"]


def spoil_file(workspace, name):
    """Cuts an image off; its header still holds."""
    path = workspace / f"data/images/{name}.png"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    return path, whole


def test_a_broken_image_stops_the_run_which_goes_on_once_it_is_mended(workspace):
    settings = ("data.val_fraction=0.01",)
    whole = run(workspace, "train.run=whole", *settings)
    path, good = spoil_file(workspace, "s05")
    with pytest.raises(DataError, match=r"s05\.png cannot be decoded"):
        run(workspace, *settings)
    assert load_latest_state(workspace / "run/checkpoints") is not None
    path.write_bytes(good)
    run(workspace, *settings, resume=True)
    assert_same_results(whole, workspace / "run")


def test_a_broken_image_is_left_out_if_the_setting_allows_it(workspace):
    spoil_file(workspace, "s05")
    settings = ("data.val_fraction=0.01", "data.skip_broken=true", "train.log_every=1")
    text = said(workspace, *settings)
    broken = events_of(workspace / "run", "broken")
    assert len(broken) == 2  # Once an epoch.
    assert {e["image"] for e in broken} == {"s05"}
    assert all("s05.png cannot be decoded" in e["fault"] for e in broken)
    assert text.count("left out an image.") == 2
    assert "left out 1" in text
    assert "Images left out since they cannot be read: 1 (s05)." in text
    assert load_latest_state(workspace / "run/checkpoints").tally["broken"].keys() == {"s05"}


def test_a_run_that_stopped_at_a_broken_image_may_go_on_without_it(workspace):
    spoil_file(workspace, "s05")
    settings = ("data.val_fraction=0.01",)
    allowed = (*settings, "data.skip_broken=true")
    with pytest.raises(DataError, match="s05"):
        run(workspace, *settings)
    run(workspace, *allowed, resume=True)
    whole = run(workspace, "train.run=whole", *allowed)
    assert_same_results(whole, workspace / "run")


def test_a_broken_image_of_the_evaluation_is_left_out_too(workspace):
    whole = run(workspace, "train.run=whole", "train.epochs=1")
    record = json.loads((whole / "samples.json").read_text())
    stem = record["val"][0][0]
    spoil_file(workspace, stem)
    with pytest.raises(DataError, match=stem):
        run(workspace, "train.run=strict", "train.epochs=1")
    text = said(workspace, "train.epochs=1", "data.skip_broken=true")
    assert f"evaluation: left out an image. {workspace / 'data/images' / stem}" in text
    (event,) = events_of(workspace / "run", "evaluate")
    assert event["num_images"] == len(record["val"]) - 1


@pytest.mark.parametrize("loss_at", ["grid", "full"])
def test_a_step_without_the_broken_image_is_the_step_of_the_others(workspace, loss_at):
    samples, classes, step = crowded_step(workspace)
    (work,) = step.passes
    without = Pass(
        Layout(work.layout.canvas, work.layout.placements[:1] + work.layout.placements[2:]),
        (0, 2, 3),
    )
    expected = loaded_step(samples, classes, Step((without,)), loss_at)
    spoil_file(workspace, samples[1].stem)
    got = loaded_step(samples, classes, step, loss_at, skip_broken=True)
    assert list(got.broken) == [samples[1].stem]
    (a,), (b,) = got.batches, expected.batches
    assert (a.layout, a.stems) == (b.layout, b.stems)
    assert torch.equal(a.pixels, b.pixels)
    assert torch.equal(a.target, b.target)


def test_a_step_of_broken_images_only_is_no_step(workspace, monkeypatch):
    for path in (workspace / "data/images").iterdir():
        spoil_file(workspace, path.stem)
    taken = states(monkeypatch)
    with pytest.raises(DataError, match="No training image in .* can be read"):
        run(workspace, "data.skip_broken=true")
    assert sorted(taken) == [0, 5]
    assert same(taken[5], taken[0])


def test_an_evaluation_of_broken_images_only_is_an_error(workspace):
    whole = run(workspace, "train.run=whole", "train.epochs=1")
    for stem, *_ in json.loads((whole / "samples.json").read_text())["val"]:
        spoil_file(workspace, stem)
    with pytest.raises(DataError, match="No image of the evaluation can be read: .*png"):
        run(workspace, "data.skip_broken=true")


def test_masks_of_several_classes_are_split_too(workspace):
    root = workspace / "data"
    for path in sorted((root / "masks").glob("*.png")):
        mask = np.array(Image.open(path))
        for index, name in enumerate(("ground", "disc", "stripe")):
            (root / "masks" / name).mkdir(exist_ok=True)
            Image.fromarray((mask == index).astype(np.uint8)).save(
                root / "masks" / name / path.name
            )
        path.unlink()
    samples, classes, step = crowded_step(workspace, "multilabel")
    loaded = loaded_step(samples, classes, step, "grid")
    parts = split_to_fit(loaded.batches, 1, 255)
    assert [p.stems for p in parts] == [(s.stem,) for s in samples]
    count = SigmoidCrossEntropy().count
    assert sum(map(count, parts)) == sum(map(count, loaded.batches)) > 0
    for part, sample in zip(parts, samples, strict=True):
        check_layout(part.layout, GEOMETRY)
        alone = Pass(part.layout, (0,))
        expected = loaded_step([sample], classes, Step((alone,)), "grid").batches[0]
        assert torch.equal(part.pixels, expected.pixels)
        assert torch.equal(part.target, expected.target)


@pytest.mark.parametrize(
    "table",
    [
        {},
        {**Tally().to_json(), "num_skipped": "one"},
        {**Tally().to_json(), "bad_steps": [3]},
        {**Tally().to_json(), "broken": []},
        {**Tally().to_json(), "max_pass_pixels": 0},
        {**Tally().to_json(), "more": 1},
    ],
)
def test_a_tally_that_does_not_hold_is_refused(table):
    with pytest.raises(WeightsError, match="step-1 has a tally"):
        Tally().restore(table, "step-1")
    other = Tally()
    other.restore(Tally(num_skipped=2, max_pass_pixels=7).to_json(), "step-1")
    assert (other.num_skipped, other.max_pass_pixels) == (2, 7)
