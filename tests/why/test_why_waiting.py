"""Waits for data: what they are called, whose line they are in, and advice that was tried."""

from dataclasses import replace

import pytest
import torch
from tests.why.planted import recorded
from torch.utils.data import DataLoader, Dataset, IterableDataset

from anysize_why.causes import judge
from anysize_why.loading import fetch, repeats_samples, try_workers
from anysize_why.waiting import num_workers_needed
from anysize_why.why import explain, watch

HANGS = """
import os, time
import torch
from torch.utils.data import DataLoader, Dataset
from anysize_why import workers

workers.HANG_S, workers.IDLE_S = 2.0, 1.0


class Items(Dataset):
    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index == 9:
            print(os.getpid(), file=open(PIDS, "a"))
            time.sleep(900)
        return torch.ones(4)


net = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(net.parameters(), 0.01)
for x in DataLoader(Items(), num_workers=NUM):
    optimizer.zero_grad()
    net(x).sum().backward()
    optimizer.step()
"""


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_data_set_that_hangs_is_named_with_its_line_and_nothing_is_left(
    tmp_path, num_workers, monkeypatch
):
    monkeypatch.setattr("anysize_why.why.GRACE_S", 3.0)
    pids, script = tmp_path / "pids", tmp_path / "hang.py"
    script.write_text(f"PIDS, NUM = {str(pids)!r}, {num_workers}\n{HANGS}")
    watched = watch(script, num_steps=60, seconds=40)
    assert watched.ended == "hung"
    found = explain(watched)
    assert not found.healthy
    finding = found.findings[0]
    assert finding.cause == ("a loader worker hangs" if num_workers else "the data set hangs")
    assert "hang.py:18 `time.sleep(900)`" in finding.evidence
    for pid in map(int, pids.read_text().split()):
        with pytest.raises(ProcessLookupError):
            _alive(pid)


def _alive(pid):
    import os
    from pathlib import Path

    os.kill(pid, 0)
    if ") Z " in Path(f"/proc/{pid}/stat").read_text():
        raise ProcessLookupError


@pytest.mark.parametrize(
    ("more", "helps"),
    [
        ([0.02, 0.021, 0.019], True),
        ([0.1, 0.101, 0.099], False),  # No better.
        ([0.12, 0.13, 0.14], False),  # Worse.
        ([0.02, 0.5, 0.09], False),  # Not certain.
    ],
)
def test_more_workers_are_only_advised_where_they_were_tried_and_helped(more, helps):
    record = recorded("few_workers")
    as_it_is = [0.1, 0.1, 0.1]
    seconds = {"as it is": as_it_is, "more": more}
    control = {"workers": 8, "seconds": seconds, "sizes": {key: [1, 1, 1] for key in seconds}}
    found = judge(replace(record, controls={**record.controls, "workers": control})).findings[0]
    assert found.cause == "too few workers"
    assert ("num_workers=8, persistent" in found.change) == helps
    assert ("were tried and do not help" in found.change) != helps
    if helps:
        assert found.cost_s == pytest.approx(0.8 * record.wall_s, rel=0.02)


def test_a_wait_is_called_decoding_only_where_a_decoder_was_seen():
    record = recorded("slow_decoding")
    assert judge(record).findings[0].cause == "slow decoding in the main thread"
    lines = [{**line, "via": "matplotlib"} for line in record.facts["lines"]]
    found = judge(replace(record, facts={**record.facts, "lines": lines})).findings[0]
    assert found.cause == "waiting for data that the main thread fetches"


def test_the_line_of_a_worker_is_named_with_its_text():
    record = recorded("few_workers")
    looks = [{"file": "/d/data.py", "line": 9, "via": "numpy", "looks": 3}]
    facts = {**record.facts, "worker_lines": looks, "texts": {"/d/data.py:9": "x = f(y)"}}
    found = judge(replace(record, facts=facts)).findings[0]
    assert "data.py:9 `x = f(y)` (in numpy) (100% of 3 looks at the workers)" in found.evidence


def test_workers_needed_keep_up_with_the_rest_of_a_step():
    assert num_workers_needed(0.4, 0.1) == 5
    assert num_workers_needed(0.01, 0.1) == 1


class Numbers(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((2,), float(index))


class Stream(IterableDataset):
    def __init__(self, draw):
        self.draw = draw

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        first = info.id if info and self.draw == "shared out" else 0
        for number in range(first, 100):
            yield torch.randn(2) if self.draw == "random" else torch.full((2,), float(number))


def test_a_batch_sampler_and_a_stream_are_timed_by_the_batch():
    sampler = torch.utils.data.BatchSampler(range(64), 8, drop_last=True)
    assert fetch(DataLoader(Numbers(), batch_sampler=sampler), 0.01)["batch"] == 8
    found = fetch(DataLoader(Stream("all"), batch_size=4), 0.01)
    assert found["batch"] == 4
    assert len(found["seconds"]) >= 3
    assert fetch(DataLoader(Numbers(), batch_size=None), 0.01)["batch"] == 1


def test_a_stream_that_every_worker_repeats_is_told_from_one_that_is_shared_out():
    with torch.random.fork_rng():
        assert repeats_samples(DataLoader(Stream("all")))
        assert not repeats_samples(DataLoader(Stream("shared out")))
        assert not repeats_samples(DataLoader(Stream("random")))
        assert repeats_samples(DataLoader(Numbers())) is None
    record = recorded("few_workers")
    causes = [f.cause for f in judge(replace(record, controls={"repeats": True})).findings]
    assert "every worker gives the same samples" in causes


def test_workers_are_tried_with_the_same_batches_and_none_is_left():
    steps = []
    loader = DataLoader(Numbers(), batch_size=4, num_workers=0)
    found = try_workers(loader, 1, lambda: steps.append(1), 0.1)
    assert found["workers"] == 1
    assert all(len(times) == 3 and min(times) > 0 for times in found["seconds"].values())
    assert steps
