"""Makes `tests/engines.py` importable."""

import sys
from pathlib import Path

TESTS = str(Path(__file__).resolve().parents[2])
if TESTS not in sys.path:
    sys.path.append(TESTS)
