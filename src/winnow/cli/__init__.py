"""The command line: one module for each group of commands."""

import os
import sys


def main() -> None:
    """Entry point: `winnow.cli.main`, whose imports Ctrl-C may interrupt."""
    try:
        os.getcwd()
        from winnow.cli.main import main as run
    except FileNotFoundError:
        print("winnow: the working directory no longer exists; cd to another one", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("winnow: interrupted", file=sys.stderr)
        sys.exit(130)
    run()
