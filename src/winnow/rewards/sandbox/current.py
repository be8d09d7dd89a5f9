"""The one sandbox of this process: its slots bound how many programs run over the whole run."""

from __future__ import annotations

import threading

from winnow.config.sandbox import SandboxConfig
from winnow.rewards.sandbox.local import LocalSandbox

_lock = threading.Lock()
_sandbox: LocalSandbox | None = None


def start(config: SandboxConfig) -> LocalSandbox:
    """The sandbox of this section; one of another section is closed.

    Raises:
        RewardError: this machine has no way to confine programs.
    """
    global _sandbox
    with _lock:
        if _sandbox is None or _sandbox.config != config:
            _close()
            _sandbox = LocalSandbox(config)
        return _sandbox


def current() -> LocalSandbox:
    """The sandbox that was started, or one with the defaults."""
    with _lock:
        if _sandbox is not None:
            return _sandbox
    return start(SandboxConfig())


def close() -> None:
    """End the sandbox and what runs in it."""
    with _lock:
        _close()


def _close() -> None:
    global _sandbox
    if _sandbox is not None:
        _sandbox.close()
        _sandbox = None
