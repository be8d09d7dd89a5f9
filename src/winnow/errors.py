"""The one hierarchy of errors that reach a user.

A message says what was given, what is allowed, and what to do. `WinnowError` and its
children mean that the user can mend it (exit code 2); anything else is our mistake
(exit code 1).
"""

from __future__ import annotations


class WinnowError(Exception):
    """Something the user gave us is wrong; the message is one line: field, value, remedy."""

    exit_code = 2


class ConfigError(WinnowError):
    """A recipe or an override is wrong."""


class DataError(WinnowError):
    """A data file or a row of it is wrong; names file, row and field."""


class ModelError(WinnowError):
    """A model folder, its tokenizer or its chat template is wrong."""


class RewardError(WinnowError):
    """A scorer is missing, or fails too often to train on."""


class CheckpointError(WinnowError):
    """A checkpoint is missing, damaged, or belongs to another run."""


class NoSignalError(WinnowError):
    """Sampling met its bound without a group to learn from."""


class TrainingError(WinnowError):
    """Training cannot go on, such as after repeated non-finite gradients."""
