"""Arms in processes of their own, so that none meets the kernels or the memory of another.

A worker is a leader of its own process group: Ctrl-C at a terminal reaches the benchmark only,
which then ends its workers and all that these have started.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any, Protocol

from anysize.bench.arms import Arm, OptimiserStep
from anysize.bench.summary import BenchError
from anysize.config import ModelConfig
from anysize.geometry import Layout
from anysize.models.levels import has_basic_units, num_out

FAILED = "failed"
_SECONDS_TO_END = 5.0


class Worker(Protocol):
    """An arm that takes steps when it is asked to."""

    def wait_until_ready(self) -> None:
        """Returns when its net is built."""
        ...

    def step(self, layouts: OptimiserStep) -> float:
        """Seconds of one optimiser step."""
        ...

    def peak_memory_bytes(self) -> int:
        """The most memory that it held so far."""
        ...

    def close(self) -> None:
        """Ends it, at once."""
        ...


class NetWorker:
    """A net of PyTorch in a process of its own."""

    def __init__(self, arm: Arm, config: ModelConfig, device: str) -> None:
        self.name = arm.name
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(arm, config, device, theirs), daemon=True
        )
        with _ctrl_c_blocked():
            self._process.start()
        theirs.close()

    def wait_until_ready(self) -> None:
        """Returns when its net is built.

        Raises:
            BenchError: It could not be built.
        """
        self._answer()

    def step(self, layouts: OptimiserStep) -> float:
        """Seconds of one optimiser step.

        Raises:
            BenchError: The step failed, or the process died.
        """
        return self._ask("step", layouts)

    def step_within(self, layouts: OptimiserStep, seconds: float) -> float | None:
        """Seconds of one optimiser step, or None where it took longer; then it can only be closed.

        Raises:
            BenchError: The step failed, or the process died.
        """
        if seconds <= 0:
            return None
        with contextlib.suppress(BrokenPipeError):  # The answer says that it died.
            self._connection.send(("step", layouts))
        return self._answer() if self._connection.poll(seconds) else None

    def peak_memory_bytes(self) -> int:
        """The most memory that it held so far."""
        return self._ask("memory")

    def flops_a_pixel(self, layout: Layout) -> float:
        """Operations of a training step of the plain net, a valid pixel."""
        return self._ask("flops", layout)

    def limit_flops_s(self, seconds: float) -> float:
        """What a convolution of the net's width reaches, operations a second."""
        return self._ask("limit", seconds)

    def close(self) -> None:
        """Ends it and what it started, at once."""
        try:
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self._process.kill()
        self._process.join()
        self._connection.close()

    def _ask(self, what: str, argument: object = None) -> Any:  # noqa: ANN401
        with contextlib.suppress(BrokenPipeError):  # The answer says that it died.
            self._connection.send((what, argument))
        return self._answer()

    def _answer(self) -> Any:  # noqa: ANN401
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join(_SECONDS_TO_END)
            raise BenchError(died(self.name, self._process.exitcode)) from None
        if kind == FAILED:
            raise BenchError(f'The arm "{self.name}" failed: {value}')
        return value


def died(name: str, code: int | None) -> str:
    """What is said of a worker that is gone."""
    how = f"with exit code {code}"
    if code is not None and code < 0:
        how = f"of {signal.Signals(-code).name}"
    return (
        f'The process of the arm "{name}" died {how}. If memory ran out, lower --images-per-step '
        "or take smaller images (--megapixels)."
    )


@contextlib.contextmanager
def _ctrl_c_blocked() -> Iterator[None]:
    """A process that starts under it never sees Ctrl-C; this one sees it afterwards."""
    resource_tracker.ensure_running()  # Its own start, with the first process, would unblock it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(arm: Arm, config: ModelConfig, device: str, connection: Connection) -> None:
    """The other side: answers until the benchmark is over."""
    os.setpgrp()
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        try:
            answer = _answers(arm, config, device)
        except Exception as error:  # noqa: BLE001
            connection.send((FAILED, _in_a_line(error)))
            return
        connection.send(("ready", None))
        while True:
            what, argument = connection.recv()
            try:
                connection.send((what, answer(what, argument)))
            except (EOFError, BrokenPipeError, ConnectionResetError):
                raise
            except Exception as error:  # noqa: BLE001
                connection.send((FAILED, _in_a_line(error)))


def _answers(arm: Arm, config: ModelConfig, device_name: str) -> Any:  # noqa: ANN401
    """Builds the net; what comes back answers a question."""
    import torch

    from anysize.bench.nets import PlainNet, build_net
    from anysize.device import peak_memory_bytes
    from anysize.limits import convolution_flops_s

    device = torch.device(device_name)
    net = build_net(arm, config, device)

    def answer(what: str, argument: Any) -> float:  # noqa: ANN401
        match what:
            case "step":
                return net.step(argument)
            case "memory":
                return peak_memory_bytes(device)
            case "flops":
                assert isinstance(net, PlainNet)
                return net.flops_a_pixel(argument)
            case _:
                return convolution_flops_s(
                    num_out(config.base_depth, block=0, basic=has_basic_units(config)),
                    precision=arm.precision,
                    device=device,
                    seconds=argument,
                )

    return answer


def _in_a_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
