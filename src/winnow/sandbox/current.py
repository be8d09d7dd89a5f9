"""The one sandbox of this process: its slots bound how many programs run over the whole run."""

from __future__ import annotations

import threading

from winnow.config.reward import FusionConfig, SandboxConfig
from winnow.sandbox.local import LocalSandbox
from winnow.sandbox.program import Sandbox

_lock = threading.Lock()
_sandbox: Sandbox | None = None


def start(config: SandboxConfig | FusionConfig) -> Sandbox:
    """The sandbox of this section; one of another section is closed.

    Raises:
        RewardError: this machine has no way to confine programs, or the service runs none.
    """
    global _sandbox
    with _lock:
        if _sandbox is None or _sandbox.config != config:
            _close()
            _sandbox = _made(config)
        return _sandbox


def current() -> Sandbox:
    """The sandbox that was started, or one with the defaults."""
    with _lock:
        if _sandbox is not None:
            return _sandbox
    return start(SandboxConfig())


def close() -> None:
    """End the sandbox and what runs in it."""
    with _lock:
        _close()


def _made(config: SandboxConfig | FusionConfig) -> Sandbox:
    if isinstance(config, SandboxConfig):
        return LocalSandbox(config)
    from winnow.sandbox.fusion import FusionSandbox  # httpx takes its time to import

    return FusionSandbox(config)


def _close() -> None:
    global _sandbox
    if _sandbox is not None:
        _sandbox.close()
        _sandbox = None
