"""The benchmarks run from end to end on tiny nets and images; their figures are not judged here.

What they compute from measured figures is held against figures that are known.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(name, path, *arguments):
    done = subprocess.run(
        [sys.executable, BENCHMARKS / name, *map(str, arguments), "--json", path],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(path.read_text()), done.stdout


@pytest.fixture
def benchmark_modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.slow
def test_memory_tells_growth_peaks_and_the_largest_image(tmp_path):
    found, said = run(
        "memory.py",
        tmp_path / "m.json",
        *("--units", "1,1,1,1", "--sizes", 8, "--areas", "0.004,0.009"),
        *("--max-canvases", 2, "--megapixels", 0.03, "--base-depth", 32),
    )
    grown = found["growth"]
    assert grown["sizes"] == 8
    assert grown["steps"] == 2
    assert 1 <= len(grown["canvases"]) <= 2
    assert len(grown["resident_bytes"]) == 3
    assert grown["growth_bytes"] == grown["resident_bytes"][-1] - grown["resident_bytes"][0]
    parameters_and_momentum = 2 * 4 * 1.2e6
    assert all(parameters_and_momentum < p < 2e9 for p in found["peak_bytes"].values())
    assert found["checkpointing_four_times_bytes"] > found["peak_bytes"]["checkpointing"]
    assert "growth over 8 sizes" in said
    assert "of plain, checkpointing trains an image" in said


def test_the_largest_image_lies_on_the_line_through_two_peaks(benchmark_modules):
    memory = importlib.import_module("memory")
    assert memory._times_as_large(budget=500, once=200, four_times=500) == pytest.approx(4)
    assert memory._times_as_large(budget=200, once=200, four_times=500) == pytest.approx(1)
    assert memory._times_as_large(budget=100, once=200, four_times=500) == pytest.approx(0)
    assert memory._times_as_large(budget=500, once=200, four_times=200) is None


def test_the_peak_is_that_of_now_and_not_of_earlier(benchmark_modules):
    work = importlib.import_module("drawn_work")
    earlier = np.ones(200_000_000, np.uint8)
    del earlier
    before = work.resident_bytes()
    work.forget_peak()
    assert work.peak_resident_bytes() - before < 100_000_000
    now = np.ones(200_000_000, np.uint8)
    del now
    assert 150_000_000 < work.peak_resident_bytes() - before < 300_000_000
    assert work.resident_bytes() - before < 100_000_000


@pytest.mark.slow
def test_seconds_over_pixels_are_printed_fitted_and_plotted(tmp_path):
    found, said = run(
        "linear_in_pixels.py",
        tmp_path / "l.json",
        *("--units", "1,1,1,1", "--megapixels", "0.004,0.03", "--sizes", 3, "--rounds", 2),
        *("--plot", tmp_path / "l.png"),
    )
    assert [row["pixels"] for row in found["sizes"]] == sorted(r["pixels"] for r in found["sizes"])
    assert all(row["seconds"]["median"] > 0 for row in found["sizes"])
    assert found["worst_deviation"] >= 0
    assert "slope of log seconds over log pixels" in said
    with Image.open(tmp_path / "l.png") as picture:
        assert min(picture.size) > 300


def test_a_line_is_told_from_a_cost_that_grows_faster(benchmark_modules):
    linear = importlib.import_module("linear_in_pixels")
    sizes = linear.spaced_sizes(8, (0.03, 4.0))
    assert abs(sizes[0].pixels - 3e4) < 1e3
    assert abs(sizes[-1].pixels - 4e6) < 1e4
    straight = linear.describe(sizes, [2e-6 * s.pixels for s in sizes])
    assert straight["slope"] == pytest.approx(1)
    assert straight["worst_deviation"] == pytest.approx(0, abs=1e-6)
    with_start = linear.describe(sizes, [0.1 + 2e-6 * s.pixels for s in sizes])
    assert with_start["fixed_s"] == pytest.approx(0.1)
    assert with_start["seconds_per_megapixel"] == pytest.approx(2)
    assert with_start["slope"] < 0.9
    assert with_start["worst_deviation"] == pytest.approx(0, abs=1e-6)
    square = linear.describe(sizes, [1e-12 * s.pixels**2 for s in sizes])
    assert square["slope"] == pytest.approx(2)
    assert square["worst_deviation"] > 0.5


def test_the_share_of_waiting_is_read_from_the_runs_own_events(tmp_path):
    found, said = run(
        "loader_stall.py",
        tmp_path / "s.json",
        *("--photos", 10, "--areas", "0.004,0.009", "--units", "1,1,1,1", "--base-depth", 16),
        *("--log-every", 1),
    )
    assert found["steps"] == len(found["windows"]) == 6
    waited = sum(w["wait_s"] for w in found["windows"])
    assert 0 <= waited <= found["elapsed_s"]
    assert found["wait_share"] == pytest.approx(waited / found["elapsed_s"])
    assert "they waited" in said


def test_the_share_of_waiting_is_of_all_seconds_and_no_mean_of_shares(benchmark_modules):
    stall = importlib.import_module("loader_stall")
    events = [{"wait_s": 1.0, "elapsed_s": 2.0}, {"wait_s": 0.0, "elapsed_s": 8.0}]
    assert stall.wait_share(events) == pytest.approx(0.1)
