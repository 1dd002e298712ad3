"""The command in float64, or with a fault on the last rank, on the ranks that `torchrun` starts.

torchrun --nproc-per-node 2 tests/flow/ranks_script.py FAULT train run.toml ...
"""

import dataclasses
import math
import os
import signal
import sys

from anysize.cli.main import main
from anysize.predict import evaluate
from anysize.training import job as job_module
from anysize.training import step as step_module

FAULT_AT = 3
"""The step, from 1, at which the fault occurs."""


def in_float64(patch=setattr):
    """Nets and pixels of the product in float64."""
    build, logits, take = job_module.build_model, evaluate.canvas_logits, job_module.Job.take_step

    def doubled(self, batches, *args, **kwargs):
        batches = [dataclasses.replace(b, pixels=b.pixels.double()) for b in batches]
        return take(self, batches, *args, **kwargs)

    patch(job_module, "build_model", lambda *a, **k: build(*a, **k).double())
    patch(job_module.Job, "take_step", doubled)
    patch(
        evaluate,
        "canvas_logits",
        lambda net, pixels, *a, **k: logits(net, pixels.double(), *a, **k),
    )


def fail(fault):
    """Makes something go wrong on the last rank, once or from then on."""
    take, backward = job_module.Job.take_step, step_module._backward
    calls = {"steps": 0, "passes": 0}

    def step(self, *args, **kwargs):
        calls["steps"] += 1
        calls["passes"] = 0
        if self.ranks.rank == self.ranks.size - 1 and calls["steps"] == FAULT_AT:
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "sigterm":
                os.kill(os.getpid(), signal.SIGTERM)
            calls["passes"] = 1
        return take(self, *args, **kwargs)

    def spoilt(*args):
        due = calls["passes"] == 1
        calls["passes"] = 0
        part = backward(*args)
        if due and fault == "memory":
            raise MemoryError  # After the backward pass: the gradients are there.
        return part * math.nan if due and fault == "nan" else part

    job_module.Job.take_step, step_module._backward = step, spoilt


if __name__ == "__main__":
    if sys.argv[1] == "float64":
        in_float64()
    else:
        fail(sys.argv[1])
    sys.exit(main(sys.argv[2:]))
