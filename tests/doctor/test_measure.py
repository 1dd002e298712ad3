"""Measuring the real loop. What these assert is structure; no duration decides."""

import dataclasses
import math
import signal
import statistics
import time

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from tests.flow.runs import LARGE, SMALL, run

from anysize.atomic_files import only_process_in
from anysize.config import load_config
from anysize.data.batch import Batch
from anysize.doctor import controls, loop
from anysize.doctor import measure as measure_module
from anysize.doctor.diagnose import describe, diagnose, estimate_epoch
from anysize.doctor.measure import find_subject, measure
from anysize.errors import ConfigError, DataError, DoctorError
from anysize.geometry import Canvas, NetGeometry, Size, padded_batch
from anysize.models.build import build_model
from anysize.planning.canvases import Plan, write_plan
from anysize.training import job as job_module
from anysize.training.events import read_events
from anysize.training.losses import CrossEntropy
from anysize.training.optim import build_optimizer
from anysize.training.run import train
from anysize.training.step import train_step

PLANNED = """
[plan]
file = "plan.json"
images_per_step = 2
"""


@pytest.fixture
def planned(workspace, monkeypatch):
    """A workspace with a plan, which takes seconds to make; for a machine of any speed."""
    monkeypatch.setattr(measure_module, "FOR_TRIALS", 0)
    monkeypatch.setattr(measure_module, "FOR_CONTROLS", 0)
    plan = Plan(
        geometry=NetGeometry(16),
        images_per_step=2,
        max_pixels_per_step=LARGE.pixels,
        canvases=(SMALL, LARGE),
    )
    write_plan(plan, workspace / "plan.json", sizes=[])
    text = (workspace / "run.toml").read_text()
    head, rest = text.split("[plan]")
    (workspace / "run.toml").write_text(head + PLANNED + "[model]" + rest.split("[model]")[1])
    return workspace


def set_keys(workspace, **keys):
    path = workspace / "run.toml"
    lines = "".join(f"{key} = {value}\n" for key, value in keys.items())
    path.write_text(path.read_text().replace("[train]\n", f"[train]\n{lines}"))


def contents(folder):
    return {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file()}


def measured(path, seconds=0.3):
    return measure(find_subject(path), seconds=seconds)


def test_the_stages_of_the_real_loop_add_up(planned):
    before = contents(planned)
    m = measured(planned / "run.toml")
    assert len(m.steps) >= 2
    for step in m.steps:
        assert {"forward", "backward", "optimiser", "wait for data", "logging"} <= set(step.stages)
        assert all(seconds >= 0 for seconds in step.stages.values())
        assert sum(step.stages.values()) <= step.wall_s
        assert 0 < step.valid_pixels <= step.computed_pixels
    assert m.steps[0].first_of_epoch
    assert sum(s.new_canvases for s in m.steps) <= m.num_canvases <= 2
    assert set(m.loader_s) == {"decode", "transform", "place"}
    assert all(seconds > 0 for seconds in m.loader_s.values())
    assert m.epoch_images == 11
    assert m.steps_per_epoch == 6
    assert m.val_images == 3
    diagnosis = diagnose(m)
    found = diagnosis.verdict
    assert sum(s for _, s in found.stages) == pytest.approx(found.wall_s, rel=0, abs=1e-9)
    assert found.wall_s == estimate_epoch(m).wall_s
    # What no stage accounts for is a line of its own, and what it says is what is left.
    name, rest = found.stages[-1]
    assert name == "unaccounted"
    named = sum(seconds for _, seconds in found.stages[:-1])
    assert rest == pytest.approx(found.wall_s - named, rel=0, abs=1e-9)
    assert rest == pytest.approx(estimate_epoch(m).unaccounted_s, rel=0, abs=1e-9)
    share = f"{rest / found.wall_s:.1%}"
    assert any(
        line.split()[0] == "unaccounted" and line.split()[-1] == share
        for line in describe(m, diagnosis).splitlines()
        if line.split()
    )
    assert contents(planned) == before  # Nothing is left, and no folder of a run is made.
    assert not (planned / "run").exists()


def test_a_finding_names_keys_that_are_there_and_hold(planned):
    set_keys(planned, checkpoint_every=1, channels_last="false")
    path = planned / "run.toml"
    path.write_text(path.read_text().replace("checkpoint_every = 1000\n", ""))
    m = measured(path)
    names = {c.name for c in m.controls}
    assert names - {"fewer threads"} == {"precision bf16", "channels_last"}
    assert all(len(c.ratios) >= 2 and min(c.ratios) > 0 for c in m.controls)
    keys = {*m.settings, *(key for t in m.trials for key, _ in t.settings)}
    config = load_config(path)
    for key in keys:
        section, name = key.split(".")
        assert hasattr(getattr(config, section), name)
    for key, value in [s for f in diagnose(m).verdict.findings for s in f.settings]:
        text = str(value).lower() if isinstance(value, bool) else repr(value)
        load_config(path, [f"{key}={text}"])
    assert m.settings["train.checkpoint_every"] == 1
    assert m.settings["plan.max_canvases"] == 2  # Those of the plan file.
    assert m.checkpoint_s > 0


def test_the_net_learns_nothing_and_all_that_was_changed_is_put_back(planned, monkeypatch):
    set_keys(planned, channels_last="false")
    path = planned / "run.toml"
    path.write_text(path.read_text().replace("[model]", "[model]\nactivation_checkpointing = true"))
    jobs = []
    real = measure_module.prepare

    def watched(*args, **options):
        job = real(*args, **options)
        jobs.append((job, {n: p.clone() for n, p in job.model.named_parameters()}))
        return job

    monkeypatch.setattr(measure_module, "prepare", watched)
    num_threads = torch.get_num_threads()
    m = measured(path)
    ((job, before),) = jobs
    for name, parameter in job.model.named_parameters():
        assert torch.equal(parameter, before[name]), name
        assert parameter.is_contiguous()
    assert job.model.body.activation_checkpointing
    assert torch.get_num_threads() == num_threads
    assert m.memory_share > 0
    assert "activation_checkpointing off" in {c.name for c in m.controls}


def test_the_real_step_is_timed(planned, monkeypatch):
    calls = []
    real = job_module.train_step

    def counted(*args, **options):
        calls.append(options["stage"])
        return real(*args, **options)

    monkeypatch.setattr(job_module, "train_step", counted)
    m = measured(planned / "run.toml")
    timed = [stage for stage in calls if stage.__name__ == "stage"]
    assert len(timed) >= len(m.steps)


def test_a_step_that_is_timed_gives_the_same_bits(planned):
    config = load_config(planned / "run.toml")

    def after(**options):
        model = build_model(config.model, 3, generator=torch.Generator().manual_seed(1)).train()
        optimizer = build_optimizer(model, config.optim)
        layout = padded_batch([Size(60, 60)], Canvas(1, 64, 64), model.geometry)
        pixels = torch.ones(1, 3, 64, 64)
        target = torch.zeros(1, 64, 64, dtype=torch.uint8)
        batch = Batch(
            pixels=pixels,
            target=target,
            layout=layout,
            stems=("a",),
            geometry=model.geometry,
            loss_at="full",
        )
        loss = train_step(model, CrossEntropy(), [batch], optimizer, **options).loss
        return loss, model.state_dict()

    loss, state = after()
    clock = loop.Clock(torch.device("cpu"))
    timed_loss, timed_state = after(stage=clock.stage)
    assert torch.equal(loss, timed_loss)
    assert all(torch.equal(state[name], timed_state[name]) for name in state)
    assert set(clock.take()) == {"transfer", "forward", "backward", "optimiser"}


@pytest.mark.parametrize("recompute", [False, True])
def test_operations_are_counted_as_the_net_has_them(planned, recompute):
    """Against a count by hand of forward and backward of every convolution, each once."""
    path = planned / "run.toml"
    setting = f"[model]\nactivation_checkpointing = {str(recompute).lower()}"
    path.write_text(path.read_text().replace("[model]", setting))
    subject = find_subject(planned / "run.toml")
    job = measure_module._prepared(subject)
    one_size = controls.one_size_step(job, [Size(64, 64)])
    canvas = one_size.batches[0].layout.canvas
    shapes = {}

    def note(name):
        return lambda module, inputs, output: shapes.update({name: output.shape})

    hooks = [
        m.register_forward_hook(note(n))
        for n, m in job.model.named_modules()
        if hasattr(m, "weights")
    ]
    job.model(one_size.batches[0].pixels, one_size.batches[0].layout)
    for hook in hooks:
        hook.remove()
    total = 0
    for name, module in job.model.named_modules():
        if name in shapes:
            slots, _, height, width = shapes[name]
            weights = module.weights.numel()
            cells = slots * height * width
            if name == "head":  # Transposed: every cell of its input meets all weights.
                cells = slots * (height // 2) * (width // 2)
            total += 2 * weights * cells * (2 if name == "body.conv1" else 3)
    counted = controls.Controls(job, [], one_size).flops_a_pixel() * canvas.pixels
    assert counted == pytest.approx(total, rel=0.02)


def test_a_run_is_measured_by_its_own_plan_and_left_alone(planned):
    set_keys(planned, run='"other"')
    folder = run(planned, "train.epochs=1", "train.run=run")
    text = (folder / "run.toml").read_text()
    (folder / "run.toml").write_text(text.replace("epochs = 1\n", "epochs = 2\n"))
    (planned / "plan.json").unlink()
    before = contents(planned)
    m = measured(folder)
    assert m.epochs == 2
    assert contents(planned) == before
    (folder / "run.toml").write_text(text)
    with pytest.raises(DoctorError, match=r"is finished: all 6 steps.*give .*run\.toml"):
        measured(folder)


def test_a_run_that_is_being_trained_is_not_measured(planned):
    (planned / "run").mkdir()
    with only_process_in(planned / "run"), pytest.raises(DoctorError, match="at this moment"):
        find_subject(planned / "run.toml")
    find_subject(planned / "run.toml")


def test_what_is_not_a_run_is_named(planned):
    with pytest.raises(DoctorError, match=r"no run in .*nowhere"):
        find_subject(planned / "nowhere")
    with pytest.raises(ConfigError, match="No such file"):
        find_subject(planned / "nowhere.toml")
    for seconds in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(DoctorError, match="--seconds is"):
            measured(planned / "run.toml", seconds=seconds)
    (planned / "data").rename(planned / "moved")
    with pytest.raises(DataError, match="data"):
        measured(planned / "run.toml")


def test_an_image_that_breaks_is_named_and_nothing_is_left(planned):
    path = next((planned / "data" / "images").iterdir())
    path.write_bytes(path.read_bytes()[:-40])
    for other in (planned / "data" / "images").iterdir():
        other.write_bytes(other.read_bytes()[:-40])
    before = contents(planned)
    with pytest.raises(DataError, match=r"\.png"):
        measured(planned / "run.toml")
    assert contents(planned) == before
    assert not list(planned.glob(".anysize*"))


def test_memory_that_runs_out_is_a_message(planned, monkeypatch):
    def full(*args, **options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr(job_module, "train_step", full)
    with pytest.raises(DoctorError, match="Memory ran out while measuring"):
        measured(planned / "run.toml")


def test_slow_steps_are_measured_without_controls(planned, monkeypatch):
    monkeypatch.setattr(measure_module, "FOR_TRIALS", 10**6)
    monkeypatch.setattr(measure_module, "FOR_CONTROLS", 10**6)
    m = measured(planned / "run.toml", seconds=0.1)
    assert (m.controls, m.trials) == ((), ())
    assert "were not tried: that takes --seconds" in m.not_measured


def test_a_measurement_that_is_terminated_leaves_nothing(planned, monkeypatch):
    before = contents(planned)
    handler = signal.getsignal(signal.SIGTERM)

    def terminated(*args, **options):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(measure_module, "evaluate", terminated)
    with pytest.raises(KeyboardInterrupt):
        measured(planned / "run.toml")
    assert contents(planned) == before
    assert not list(planned.glob(".anysize*"))
    assert signal.getsignal(signal.SIGTERM) is handler


def test_cores_are_those_that_may_be_used(monkeypatch):
    if not hasattr(measure_module.os, "sched_getaffinity"):
        pytest.skip("no affinity on this system")
    monkeypatch.setattr(measure_module.os, "sched_getaffinity", lambda _: {0, 3, 5})
    assert 1 <= measure_module.num_cores() <= 3


def huge_images(workspace, height, width):
    for folder in ("images", "masks"):
        for path in (workspace / "data" / folder).iterdir():
            with Image.open(path) as picture:
                picture.resize((width, height), Image.Resampling.NEAREST).save(path)


@pytest.mark.slow
def test_slow_decoding_is_the_first_finding(planned):
    huge_images(planned, 1500, 2000)
    text = (planned / "run.toml").read_text()
    text = text.replace("min_scale = 0.8", "min_scale = 0.03").replace("1.25", "0.03")
    (planned / "run.toml").write_text(text)
    set_keys(planned, evaluate_every=0)
    first = diagnose(measured(planned / "run.toml", seconds=20)).verdict.findings[0]
    assert first.cause == "waiting for data"
    assert "decode" in first.evidence


@pytest.mark.slow
def test_one_canvas_for_images_of_all_sizes_is_found(workspace):
    rng = np.random.default_rng(3)
    for path in sorted((workspace / "data" / "images").iterdir()):
        height, width = (int(x) for x in np.exp(rng.uniform(np.log(48), np.log(480), 2)))
        for folder in ("images", "masks"):
            other = workspace / "data" / folder / path.name
            with Image.open(other) as picture:
                picture.resize((width, height), Image.Resampling.NEAREST).save(other)
    text = (workspace / "run.toml").read_text()
    text = text.replace("max_canvases = 3", "max_canvases = 1").replace("epochs = 3", "epochs = 50")
    (workspace / "run.toml").write_text(text.replace("images_per_step = 4", "images_per_step = 2"))
    m = measured(workspace / "run.toml", seconds=40)
    (trial,) = [t for t in m.trials if "plan.max_canvases" in dict(t.settings)]
    assert trial.epoch_computed_pixels < 0.8 * m.epoch_computed_pixels
    assert statistics.median(trial.ratios) < 0.95
    # What else runs on the machine may spoil a turn; then it is no finding, and rightly so.
    turns = dataclasses.replace(trial, ratios=(statistics.median(trial.ratios),) * 3)
    causes = [f.cause for f in diagnose(dataclasses.replace(m, trials=(turns,))).verdict.findings]
    assert "pixels that belong to no image" in causes


@pytest.mark.slow
def test_an_estimated_epoch_is_a_real_one(planned):
    """The net is large enough for the rest of the loop to be small."""
    path = planned / "run.toml"
    text = path.read_text().replace("base_depth = 8", "base_depth = 32")
    path.write_text(text.replace("epochs = 3", "epochs = 6"))
    m = measured(path, seconds=20)
    epoch = estimate_epoch(m)
    assert epoch.unaccounted_s <= 0.03 * epoch.wall_s
    began = time.perf_counter()
    folder = train(path, console=Console(quiet=True))
    took = time.perf_counter() - began
    events = read_events(folder / "events.jsonl")
    assert statistics.fmean(e["seconds"] for e in events if e["event"] == "evaluate") > 0
    # Within a factor, since other processes come and go; starting up is not an epoch's.
    assert 0.4 < took / (m.epochs * epoch.wall_s) < 2.5
    assert math.isfinite(dataclasses.asdict(m)["limit_flops_s"])


ROUNDS = 3


@pytest.mark.slow
def test_what_checkpoints_cost_is_what_leaving_them_out_saves(planned):
    """Trained for real with one after each step, and with none but the last, by turns."""
    path = planned / "run.toml"
    text = path.read_text().replace("base_depth = 8", "base_depth = 32")
    text = text.replace("epochs = 3", "epochs = 12").replace("checkpoint_every = 1000\n", "")
    path.write_text(text)
    set_keys(planned, evaluate_every=0, checkpoint_every=1)

    def seconds_of(every, number):
        began = time.perf_counter()
        settings = (f"train.checkpoint_every={every}", f"train.run=run-{every}-{number}")
        train(path, settings, console=Console(quiet=True))
        return time.perf_counter() - began

    claimed, saved = [], []
    for number in range(ROUNDS):
        m = measured(path, seconds=15)
        found = diagnose(m).verdict
        cost = next(f.cost_s for f in found.findings if f.cause == "checkpoints")
        assert cost == dict(found.stages)["checkpoint"]
        claimed.append(cost)
        without_one = m.epochs * m.steps_per_epoch - 1  # The last is written anyway.
        difference = seconds_of(1, number) - seconds_of(10**6, number)
        saved.append(difference / without_one * m.steps_per_epoch)
    assert statistics.median(claimed) == pytest.approx(statistics.median(saved), rel=0.2)
