"""The one hierarchy of errors that reach a user.

A message says what was given, what is allowed, and what to do. `WinnowError` and its
children mean that the user can mend it (exit code 2), but for `WorkerError`, `PublicationError`,
`FolderGoneError` and `TransientError`; anything else is our mistake (exit code 1).
"""

from __future__ import annotations


class WinnowError(Exception):
    """An error in the user's input; the message is one line: field, value, remedy."""

    exit_code = 2


class ConfigError(WinnowError):
    """A recipe or an override is wrong."""


class DataError(WinnowError):
    """A data file or a row of it is wrong; names file, row and field."""


class ModelError(WinnowError):
    """A model folder, its tokenizer or its chat template is wrong."""


class RewardError(WinnowError):
    """A scorer is missing, or fails too often to train on."""


class EnvironmentFault(WinnowError):
    """An environment fails in a conversation, which is tried again; not the policy's fault."""


class CheckpointError(WinnowError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class NoSignalError(WinnowError):
    """Sampling met its bound without a group to learn from.

    Args:
        rule: name of the doctor's rule (`winnow.views.diagnosis.RULES`) that has the remedy.
    """

    def __init__(self, message: str, rule: str = "") -> None:
        super().__init__(message)
        self.rule = rule


class TrainingError(WinnowError):
    """Training cannot go on, such as after repeated non-finite gradients."""


class WorkerError(WinnowError):
    """A worker raised something that is not the user's mistake, died, or hung.

    Exit code 1: a supervised run is started again.
    """

    exit_code = 1

    def __init__(self, message: str, role: str, rank: int) -> None:
        super().__init__(message, role, rank)
        self.role = role
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class TransientError(WinnowError):
    """A disk or network error that may be transient; exit code 75, "try again"."""

    exit_code = 75


class PublicationError(WinnowError):
    """An engine does not hold the weights that were sent, or does not answer as they should.

    Exit code 1: a supervised run is started again.
    """

    exit_code = 1


class FolderGoneError(WinnowError):
    """The folder of a run is no longer where it was; exit code 1."""

    exit_code = 1
