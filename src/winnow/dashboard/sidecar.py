"""The dashboard as a child process of a run, with low priority, that ends with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import quote

from winnow.observe.usage import label_process

PORT = 8040
_LOOK_S = 0.5
_END_S = 5.0
_NICENESS = 10


@contextmanager
def serve_dashboard(folder: Path) -> Iterator[str]:
    """Serve the runs next to a run's folder while the block runs; yields a line with the address.

    A dashboard that cannot be started is reported in that line and stops nothing.
    """
    try:
        listener = _listener()
        with closing(listener):
            arguments = ["dashboard", str(folder.parent), "--listen-fd", str(listener.fileno())]
            process = subprocess.Popen(
                [sys.executable, "-m", "winnow.cli.main", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[listener.fileno()],
                start_new_session=True,  # a Ctrl-C is the run's, which saves first
            )
            label_process(process.pid, "dashboard")
            port = listener.getsockname()[1]
    except OSError as error:
        yield f"Warning: no dashboard: {error}"
        return
    try:
        yield f"Dashboard: http://127.0.0.1:{port}/#/overview?runs={quote(folder.name)}"
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listener() -> socket.socket:
    try:
        listener = socket.create_server(("127.0.0.1", PORT))
    except OSError:  # taken, by another run's
        listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as `http.service.listen` does
    return listener


def exit_with_parent() -> None:
    """Lower the priority of this process, and end it by SIGTERM when its parent ends."""
    parent = os.getppid()
    os.nice(_NICENESS)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_S)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
