"""Several processes that train one net: how they are joined, and what they tell each other.

`torchrun` starts the processes; each is a rank. Without its variables there is one rank, no process
group, and every function here does nothing. Whatever all ranks must decide alike (an error, a
request to stop, memory that ran out) is shared before it is acted upon, so that no rank waits for
one that has left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from rich.console import Console
from torch import Tensor

from anysize.device import is_out_of_memory, launched_ranks
from anysize.errors import AnysizeError, RankLostError, UnsupportedNetError

T = TypeVar("T")

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another that neither answers nor ends; one that ends is seen at once.
Rank 0 may take as long for its plan or an epoch's packing."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of the processes that work together.

    Attributes:
        rank: Of this process, from 0.
        size: Number of processes.
        on_gpu: The process group for tensors on a GPU; those of the host go through gloo.
    """

    rank: int = 0
    size: int = 1
    on_gpu: dist.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this rank writes files and speaks."""
        return self.rank == 0

    def console(self, console: Console) -> Console:
        """The console on rank 0, and a quiet one on all others."""
        return console if self.is_first else Console(quiet=True)

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place, with the same bits on all of them."""
        if self.size > 1:
            with self._losing_none():
                dist.all_reduce(tensor, group=self.on_gpu if tensor.is_cuda else None)
        return tensor

    def sum_numbers(self, *numbers: int) -> list[int]:
        """The sum of each whole number over ranks."""
        return self.sum_(torch.tensor(numbers, dtype=torch.int64)).tolist()

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on some rank."""
        return self.sum_numbers(flag) != [0]

    def gather(self, value: T) -> list[T]:
        """The value of each rank, on all of them; any object that can be pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        with self._losing_none():
            dist.all_gather_object(values, value)
        return values

    def on_first(self, work: Callable[[], T]) -> T:
        """What `work` gives on rank 0, where alone it runs; on all ranks.

        Raises:
            AnysizeError: What `work` raises; on all ranks.
        """
        if self.size == 1:
            return work()
        said: list[Any] = [None, None]
        if self.is_first:
            try:
                said[0] = work()
            except AnysizeError as error:
                said[1] = _plain(error)
        with self._losing_none():
            dist.broadcast_object_list(said, src=0)
        if said[1] is not None:
            raise said[1]
        return said[0]

    def copy_from_first(self, tensors: Iterable[Tensor]) -> None:
        """Overwrites tensors with those of rank 0."""
        if self.size > 1:
            for tensor in tensors:
                with self._losing_none():
                    dist.broadcast(tensor, 0, group=self.on_gpu if tensor.is_cuda else None)

    @contextlib.contextmanager
    def alike(self) -> Iterator[None]:
        """Runs a part that does not talk to other ranks; where it fails on one, it fails on all.

        Raises:
            AnysizeError: What some rank raised.
            MemoryError: Memory ran out on another rank.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as found:
            if self.size == 1:
                raise
            error = found
        if self.size == 1 or not self.any(error is not None):
            return
        shared = _plain(error) if isinstance(error, AnysizeError) else None
        flags = (error is not None and is_out_of_memory(error), repr(error) if error else "")
        told = self.gather((shared, *flags))
        if error is not None:
            raise error
        for known, _, _ in told:
            if known is not None:
                raise known
        for rank, (_, no_memory, text) in enumerate(told):
            if text:
                words = f"rank {rank}: {text}"
                raise MemoryError(words) if no_memory else RankLostError(f"Failed on {words}.")

    @contextlib.contextmanager
    def _losing_none(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            raise RankLostError(
                f"Rank {self.rank} of {self.size} lost touch with another one, which was killed, "
                f"failed, or did not answer within {TIMEOUT.seconds // 60} minutes "
                f"({str(error).splitlines()[0][:120]}). Go on with --resume: a run then takes its "
                "last checkpoint."
            ) from error


def _plain(error: AnysizeError) -> AnysizeError:
    """The error as other ranks are told it: of its kind, and nothing but its message."""
    kind = next(k for k in type(error).__mro__ if k.__module__ == AnysizeError.__module__)
    return kind(str(error))


ALONE = Ranks()
"""The only rank."""


@contextlib.contextmanager
def join() -> Iterator[Ranks]:
    """Joins the processes that `torchrun` started, for as long as the context lasts.

    A process group that exists already is used and left as it is.

    Raises:
        AnysizeError: What the body raises; marked where rank 0 raises and prints it as well.
    """
    owned = launched_ranks() > 1 and not dist.is_initialized()
    if owned:
        dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            yield ALONE
            return
        ranks = Ranks(dist.get_rank(), dist.get_world_size(), _group_of_gpus())
        try:
            yield ranks
        except AnysizeError as error:
            error.said_by_another = not ranks.is_first and not isinstance(error, RankLostError)
            raise
    finally:
        if owned:
            dist.destroy_process_group()


def _group_of_gpus() -> dist.ProcessGroup | None:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return None
    made = dist.new_group(backend="nccl", timeout=TIMEOUT)
    return made if isinstance(made, dist.ProcessGroup) else None


@dataclass(slots=True)
class Lockstep:
    """Exchange of the statistics of a pass, in the same order on every rank.

    A rank on which a pass failed, as for want of memory, runs it again without images: what it
    exchanged before is not exchanged again (`resume`), and the others get zeros for the rest.

    Attributes:
        ranks: All of which take part.
        expected: Whether the net is known to have norms that need it.
    """

    ranks: Ranks
    expected: bool
    _done: int = 0
    _to_skip: int = 0

    def start(self) -> None:
        """Before each pass."""
        self._done = self._to_skip = 0

    def resume(self) -> None:
        """Before a pass is run again that failed."""
        self._done, self._to_skip = 0, self._done

    def sum_(self, tensor: Tensor) -> Tensor:
        """As `Ranks.sum_`, unless it is already done."""
        return self.ranks.sum_(tensor) if self._is_due() else tensor

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensor of each rank, stacked: `[ranks, ...]`."""
        mine = tensor.new_zeros(self.ranks.size, *tensor.shape)
        mine[self.ranks.rank] = tensor
        return self.sum_(mine)

    def _is_due(self) -> bool:
        if not self.expected:
            raise UnsupportedNetError(
                "The net takes statistics of a batch by torch.nn.functional.batch_norm, outside of "
                "a torch.nn.BatchNorm, which several ranks do not know of. Use that module, or "
                "train on one rank."
            )
        self._done += 1
        if self._to_skip:
            self._to_skip -= 1
            return False
        return True

    def __deepcopy__(self, memo: object) -> Lockstep:
        return self
