"""The experiment with arms that only say how long they took; and once with real ones."""

import json
import math

import pytest

from anysize.bench import experiment
from anysize.bench.arms import Arm, arms_of, shapes_of
from anysize.bench.experiment import run_bench
from anysize.bench.plot import step_times_png
from anysize.bench.settings import bench_settings
from anysize.bench.summary import BenchError
from anysize.bench.table import ARM_COLUMNS, MEANINGS, RATIO_COLUMNS, arm_rows, ratio_rows
from anysize.cli.main import main
from anysize.config import ModelConfig

TINY = ModelConfig(units=(1, 1, 1, 1), base_depth=16)


class FakeWorker:
    """A second a megapixel computed, ten more for a new shape, and ten times that where plain."""

    closed: list[str]

    def __init__(self, arm, config, device):
        self.arm, self.seen = arm, set()

    def wait_until_ready(self):
        pass

    def step(self, layouts):
        new = shapes_of((layouts,)) - self.seen
        self.seen |= new
        rate = 10 if self.arm.policy.startswith("plain") else 1
        return rate * sum(x.canvas.pixels for x in layouts) / 1e6 + 10 * len(new)

    def step_within(self, layouts, seconds):
        return self.step(layouts)

    def peak_memory_bytes(self):
        return 1_000_000

    def flops_a_pixel(self, layout):
        return 700_000.0

    def limit_flops_s(self, seconds):
        return 7e12

    def close(self):
        self.closed.append(self.arm.name)


@pytest.fixture
def fake(monkeypatch):
    """Puts the fake workers in the place of processes; gives the names of those closed."""
    monkeypatch.setattr(FakeWorker, "closed", [], raising=False)
    monkeypatch.setattr(experiment, "NetWorker", FakeWorker)
    return FakeWorker


def settings(**changes):
    options = {
        "data": None,
        "megapixels": (0.001, 0.004),
        "images": 23,
        "rounds": 2,
        "images_per_step": 4,
        "precision": "bf16",
        "device": "cpu",
        "full": False,
        "peers": None,
    }
    return bench_settings(TINY, **{**options, **changes})


FIELDS = {
    "machine",
    "net",
    "mode",
    "images_per_step",
    "images",
    "epoch_megapixels",
    "one_size",
    "ten_sizes",
    "canvases",
    "rounds",
    "conv_limit_flops_s",
    "arms",
    "ratios",
    "notes",
    "seconds",
    "steps",
}
ARM_FIELDS = {
    "name",
    "policy",
    "sizes",
    "precision",
    "seconds_per_valid_megapixel",
    "first_visit_s",
    "repeat_visit_s",
    "waste",
    "rounds",
    "num_steps",
    "peak_rss_bytes",
}
ALWAYS = MEANINGS.keys() - {
    "shape_tax_plain_tuned",
    "speedup_over_plain_tuned",
    "speedup_over_tf_slim",
    "speedup_over_tf_slim_float32",
    "speedup_of_plain_over_tf_slim",
}


def numbers_in(value):
    match value:
        case dict():
            return [n for v in value.values() for n in numbers_in(v)]
        case list() | tuple():
            return [n for v in value for n in numbers_in(v)]
        case int() | float():
            return [value]
        case _:
            return []


def assert_complete(result, arms):
    assert result.keys() == FIELDS
    assert {a["name"] for a in result["arms"]} == {a.name for a in arms}
    for arm in result["arms"]:
        assert arm.keys() == ARM_FIELDS
        assert arm["seconds_per_valid_megapixel"].keys() == {"median", "min", "max"}
        assert arm["sizes"] in ("one", "ten", "all")
        assert 0 <= arm["waste"] < 1
    assert result["ratios"].keys() - {"spread"} == result["ratios"]["spread"].keys() == ALWAYS
    assert all(math.isfinite(n) for n in numbers_in(result))
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("full", [False, True])
def test_the_result_has_every_field_and_is_finite(fake, full):
    result = run_bench(settings(full=full), print)
    arms = arms_of("bf16", full=full, tuning=False, peers=False)
    if full:
        arms.append(Arm("compile dynamic", "all", "bf16"))
    assert_complete(result, arms)
    assert result["mode"] == ("full" if full else "quick")
    assert result["rounds"] == 2
    assert sorted(fake.closed) == sorted([*(a.name for a in arms), "plain, one size"])


def test_arms_take_turns_step_by_step(fake):
    result = run_bench(settings(), print)
    counted = [s["arm"] for s in result["steps"] if s["round"] == 1 and s["again_of"] is None]
    # At batch size 1 a turn is four steps. Four fresh turns in two rounds: two a round.
    turn = [name for i, name in enumerate(counted) if i == 0 or counted[i - 1] != name]
    names = [a["name"] for a in result["arms"]]
    ten = [a["name"] for a in result["arms"] if a["sizes"] == "ten"]
    assert names[-len(ten) :] == ten  # After the others.
    assert turn == names[: -len(ten)] * 2 + ten
    assert counted.count("plain batch 1, all sizes") == 8


def test_what_is_repeated_counts_in_no_round(fake):
    result = run_bench(settings(), print)
    again = [s for s in result["steps"] if s["again_of"] is not None]
    assert {s["arm"] for s in again} == {a["name"] for a in result["arms"] if a["sizes"] == "all"}
    for step in again:
        assert step["round"] is None
        assert not step["first_visit"]
        first = next(
            s for s in result["steps"] if (s["arm"], s["number"]) == (step["arm"], step["again_of"])
        )
        assert first["valid_pixels"] == step["valid_pixels"]
        assert first["number"] + 1 == step["number"]


def test_canvases_are_met_before_the_rounds_and_native_sizes_within_them(fake):
    result = run_bench(settings(), print)
    firsts = {s["arm"] for s in result["steps"] if s["first_visit"] and s["round"] is not None}
    assert "plain, all sizes" in firsts
    assert not any(name.startswith(("mosaic", "exact")) for name in firsts)
    assert "plain, ten sizes" not in firsts
    ratios = result["ratios"]
    # The fakes take ten more seconds for each new shape: ten a plain image, none on a canvas.
    assert ratios["speedup_over_plain"] > 1_000
    assert ratios["shape_tax_exact_first_epoch"] > ratios["shape_tax_exact_ten_epochs"]
    assert ratios["exactness_cost"] == 0.0


def test_a_slow_machine_cuts_rounds_and_says_so(fake, monkeypatch):
    clock = iter(range(0, 10**9, 4))
    monkeypatch.setattr(experiment.time, "perf_counter", lambda: float(next(clock)))
    said = []
    result = run_bench(settings(rounds=5), said.append)
    assert 1 <= result["rounds"] <= 5
    result = run_bench(settings(rounds=200, images=40), said.append)
    assert result["rounds"] < 200
    assert any("200 of 1 were wanted" in note for note in result["notes"])
    assert set(result["notes"]) <= set(said)
    assert result["ratios"].keys() - {"spread"} == ALWAYS


def test_a_far_too_slow_machine_measures_few_sizes_and_every_ratio(fake, monkeypatch):
    monkeypatch.setattr(experiment, "QUICK_SECONDS", 0.01)
    result = run_bench(settings(images=40), print)
    assert result["images"] == 8
    assert result["rounds"] == 1
    assert any("All 40 sizes would take" in note for note in result["notes"])
    assert result["ratios"].keys() - {"spread"} == ALWAYS


def test_an_arm_that_dies_ends_the_benchmark_and_all_processes(fake, monkeypatch):
    def die(self, layouts):
        if self.arm.policy == "mosaic":
            raise BenchError(f"{self.arm.name} died")
        return 1.0

    monkeypatch.setattr(FakeWorker, "step", die)
    with pytest.raises(BenchError, match="mosaic, one size died"):
        run_bench(settings(), print)
    assert len(fake.closed) == 10  # Those on ten sizes had not begun.


def test_a_compiler_that_is_missing_is_said(fake, monkeypatch):
    def fail(self, layouts, seconds):
        raise BenchError('The arm "compile dynamic, all sizes" failed: no C++ compiler')

    monkeypatch.setattr(FakeWorker, "step_within", fail)
    result = run_bench(settings(full=True), print)
    assert "compile dynamic" not in [a["policy"] for a in result["arms"]]
    assert any("no C++ compiler" in note for note in result["notes"])


def test_compiling_stops_when_its_time_is_over(fake, monkeypatch):
    def slow(self, layouts, seconds):
        self.num = getattr(self, "num", 0) + 1
        return None if self.num == 3 else 2.0

    monkeypatch.setattr(FakeWorker, "step_within", slow)
    result = run_bench(settings(full=True), print)
    (arm,) = [a for a in result["arms"] if a["policy"] == "compile dynamic"]
    assert arm["num_steps"] == 2
    assert any("time for 2 images only" in note for note in result["notes"])


def test_the_result_is_drawn_and_written_in_columns(fake):
    result = run_bench(settings(), print)
    assert step_times_png(result).startswith(b"\x89PNG")
    arms, ratios = arm_rows(result), ratio_rows(result)
    assert len(arms) == len(result["arms"])
    assert all(len(row) == len(ARM_COLUMNS) for row in arms)
    assert len(ratios) == len(ALWAYS)
    assert all(len(row) == len(RATIO_COLUMNS) for row in ratios)


def test_the_command_on_a_folder_of_images(monkeypatch, write_images, capsys, tmp_path):
    """With real processes, though of four arms only."""
    wanted = ("plain, one size", "plain, all sizes", "mosaic, all sizes")
    some = [a for a in arms_of("bf16", full=False, tuning=False, peers=False) if a.name in wanted]
    monkeypatch.setattr(experiment, "arms_of", lambda *_, **__: some)
    folder = write_images([(30 + i, 60 - 2 * i) for i in range(12)])
    out, picture = tmp_path / "b.json", tmp_path / "b.png"
    net = ("--units", "1,1,1,1", "--base-depth", "16")
    files = ("--json", str(out), "--plot", str(picture))
    assert main(["bench", "--data", str(folder), *net, "--rounds", "2", *files]) == 0
    result = json.loads(out.read_text())
    assert result["images"] == 12
    assert result["epoch_megapixels"] == sum((30 + i) * (60 - 2 * i) for i in range(12)) / 1e6
    assert [a["name"] for a in result["arms"]] == list(wanted)
    assert all(a["peak_rss_bytes"] > 50e6 for a in result["arms"])
    assert {"shape_tax_exact", "shape_tax_plain", "share_of_conv_limit"} <= result["ratios"].keys()
    assert all(math.isfinite(n) and n != 0 for n in numbers_in(result["ratios"]))
    assert picture.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "mosaic, all sizes; " in said
    assert f"Wrote {out}" in said


@pytest.mark.slow
def test_all_arms_with_real_processes(tmp_path):
    result = run_bench(settings(images=12), print)
    assert_complete(result, arms_of("bf16", full=False, tuning=False, peers=False))
