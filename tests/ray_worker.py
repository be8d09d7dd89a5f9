"""A node of Ray runs this in the place of its `setup_worker.py`: has a worker forked.

The node starts it with the words of the worker's script and the environment that the worker is to
have. The worker is no child of the node, which knows it by what it says itself, and this process is
there as long as the worker.
"""

import json
import os
import select
import socket
import sys

PATH = "WINNOW_TESTS_RAY_WORKERS"
"""The variable with the path of the socket at which `tests.ray_nodes` listens."""
_CONTEXT = "--serialized-runtime-env-context="


def main() -> None:
    """Ask for the worker, or start it as usual where it has files or modules of its own."""
    (made,) = [word for word in sys.argv if word.startswith(_CONTEXT)] or [_CONTEXT]
    words = [w for w in sys.argv[1:] if w != made and not w.startswith("--language=")]
    environment = json.loads(made.removeprefix(_CONTEXT) or "{}")
    variables = environment.get("env_vars") or {}
    if environment.get("command_prefix") or "PYTHONPATH" in variables:
        script = os.path.join(os.path.dirname(words[0]), "setup_worker.py")
        os.execv(sys.executable, [sys.executable, script, *sys.argv[1:]])
    order = {
        "module": str(os.getppid()),
        "words": words,
        "folder": os.getcwd(),
        "environment": {**os.environ, **variables},
        "descriptors": [],
        "session": False,
        "group": None,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.connect(os.environ[PATH])
        socket.send_fds(channel, [json.dumps(order).encode()], [0, 1, 2])
        pid = int(channel.recv(16))
    select.select([os.pidfd_open(pid)], [], [])


if __name__ == "__main__":
    main()
