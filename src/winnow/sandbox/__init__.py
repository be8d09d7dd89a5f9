"""Runs programs that a model wrote.

One sandbox serves a process: its slots bound how many programs run over the whole run.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from winnow.config.reward import FusionConfig, SandboxConfig

if TYPE_CHECKING:
    from winnow.sandbox.fusion import FusionSandbox
    from winnow.sandbox.local import LocalSandbox

    Sandbox = LocalSandbox | FusionSandbox

_lock = threading.RLock()
_sandbox: Sandbox | None = None


def start(config: SandboxConfig | FusionConfig) -> Sandbox:
    """Return the sandbox of this section; one of another section is closed.

    Raises:
        RewardError: this machine has no way to confine programs, or the service runs none.
    """
    global _sandbox
    with _lock:
        if _sandbox is None or _sandbox.config != config:
            close()
            if isinstance(config, SandboxConfig):
                from winnow.sandbox.local import LocalSandbox

                _sandbox = LocalSandbox(config)
            else:
                from winnow.sandbox.fusion import FusionSandbox  # httpx takes its time to import

                _sandbox = FusionSandbox(config)
        return _sandbox


def current() -> Sandbox:
    """Return the sandbox that was started, or one with the defaults."""
    with _lock:
        return _sandbox or start(SandboxConfig())


def close() -> None:
    """End the sandbox and what runs in it."""
    global _sandbox
    with _lock:
        if _sandbox is not None:
            _sandbox.close()
            _sandbox = None
