"""Each planted cause, run for real: named first, and its cost held against that of mending it."""

import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
from tests.why.planted import PLANTS, measure, true_shares

from anysize_why.why import describe, explain, watch

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", PLANTS)
def test_a_planted_cause_is_named_first_with_its_true_cost(name, monkeypatch):
    plant = PLANTS[name]
    if name != "many_threads":
        monkeypatch.setenv("OMP_NUM_THREADS", "1")  # Steadier on a machine that others use.
    measured = measure(name, 3 if plant.cause and plant.costs_time else 0)
    found = explain(measured.watched)
    causes = [finding.cause for finding in found.findings]
    if not plant.cause:
        assert causes == []
        return
    assert causes[0].startswith(plant.cause)
    if plant.costs_time:
        true = statistics.median(true_shares(name, measured))
        assert statistics.median(measured.claimed) == pytest.approx(true, rel=0.2)


OVERHEAD = """
import sys, time
import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(201):
    if step == 1:
        began = time.process_time()
    loss = model(torch.randn(512, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0:
        print(loss.item(), file=sys.stderr)
    if step == 199:
        print(time.process_time() - began, flush=True)
"""


def test_a_script_of_short_steps_is_slowed_by_less_than_a_tenth(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    script = tmp_path / "short.py"
    script.write_text(OVERHEAD)
    with_probe, without = [], []
    for _ in range(5):
        watch(script, num_steps=201, controls=False)
        with_probe.append(float(capfd.readouterr().out))
        subprocess.run([sys.executable, script], check=True)
        without.append(float(capfd.readouterr().out))
    assert statistics.median(with_probe) < 1.1 * statistics.median(without)


def test_the_question_has_both_faults_and_the_cure_has_none_of_the_first():
    script = Path(__file__).parents[2] / "examples" / "the_question.py"
    watched = watch(script, num_steps=12)
    found = explain(watched)
    causes = [finding.cause for finding in found.findings]
    assert causes[0].startswith("every step a new size")
    assert "the script's own clock is wrong" in causes
    assert re.search(
        r"^100 images take [\d.]+ s; after the change of finding 1, [\d.]+ s are expected: "
        r"[\d.]+ times as fast\.$",
        describe(watched, found),
        re.MULTILINE,
    )
    wrong = next(f for f in found.findings if f.cause == "the script's own clock is wrong")
    assert "s a step are hidden" in wrong.gain
    mended = watch(script, ["--canvas"], num_steps=12)
    assert not any("new size" in finding.cause for finding in explain(mended).findings)
    claimed = found.findings[0].cost_s
    saved = found.wall_s - explain(mended).wall_s
    assert claimed == pytest.approx(saved, rel=0.2)
