"""The version of the package, for all that names it: checkpoints, `winnow --version`, releases."""

__version__ = "0.1.0"
