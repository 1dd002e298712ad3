"""The exception tree: every error that a user can cause derives from `AnysizeError`.

A message says what is wrong, what was got, in which file, and what to do. The command line prints
the message without a traceback and exits with 2.
"""

from collections.abc import Iterable


class AnysizeError(Exception):
    """Something that the user can put right; the message says how.

    Attributes:
        said_by_another: Rank 0 of several raises it too, and prints it.
    """

    said_by_another = False


class ConfigError(AnysizeError):
    """A key or value of `run.toml`, `plan.json` or the command line is invalid."""


class DataError(AnysizeError):
    """An image, a mask, `classes.toml` or the folder that holds them is invalid."""


class ShapeError(AnysizeError):
    """An image does not fit on a canvas, or a layout breaks the rules of exact padding."""


class UnsupportedNetError(AnysizeError):
    """A net does something that cannot be followed on a canvas; the message names where."""


class WeightsError(AnysizeError):
    """A weights file or a checkpoint is damaged, or is one of another net."""


class DeviceError(AnysizeError):
    """A device was asked for that this machine does not have, or its memory ran out."""


class RankLostError(AnysizeError):
    """Of several ranks, one ended or no longer answers."""


class DoctorError(AnysizeError):
    """A run that cannot be measured; the message says what was tried."""


class StoppedByUserError(AnysizeError):
    """Ctrl-C or SIGTERM: the run was checkpointed, and can be resumed."""


def first_names(names: Iterable[str], most: int = 10) -> str:
    """How a message names many things: the first `most` of them, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more if listed else "nothing"
