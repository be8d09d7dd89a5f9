"""A server on this machine that speaks the hub's protocol, for the hub's own client."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """What the server holds, and what it was asked."""

    repos: dict[str, dict[str, bytes]] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)
    """Data sets that answer 500."""
    gated: set[str] = field(default_factory=set)
    made: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Repositories that were asked for, with what was said of them."""
    asked: list[str] = field(default_factory=list)
    cards: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Metadata of data sets, from the head of their README.md."""
    commit: str = COMMIT
    """The commit that is newest now, of all repositories."""
    url: str = ""


def handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].strip("/")
            hub.asked.append(f"{self.command} {path}")
            parts = path.split("/")
            if parts[0] == "api":  # api/KIND/OWNER/NAME, then /revision/REVISION or /tree/REVISION
                what, revision = [*parts[4:6], "revision", "main"][: 2 if parts[5:] else None][-2:]
                self._listing("/".join(parts[2:4]), revision, what == "tree")
            else:  # [datasets/]OWNER/NAME/resolve/REVISION/FILE; models have no kind in front
                at = parts.index("resolve")
                name = "/".join(parts[at + 2 :])
                self._file("/".join(parts[at - 2 : at]), parts[at + 1], name)

        do_HEAD = do_GET

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            token = (self.headers["Authorization"] or "").removeprefix("Bearer ")
            hub.asked.append(f"POST {self.path}")
            parts = self.path.strip("/").split("/")
            repo = "/".join(parts[2:4])
            if token != "write":
                self._answer(403 if token else 401, {})
            elif parts[1:3] == ["repos", "create"]:
                said = json.loads(body)
                name = "/".join(filter(None, (said.get("organization"), said["name"])))
                hub.made[name] = {"visibility": said.get("visibility"), "branches": []}
                self._answer(200, {}, json.dumps({"url": f"{hub.url}/{name}"}).encode())
            elif parts[4:5] == ["branch"]:
                hub.made[repo]["branches"].append(parts[5])
                self._answer(200, {}, b"{}")
            elif parts[4:5] == ["preupload"]:
                names = [file["path"] for file in json.loads(body)["files"]]
                files = [{"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names]
                self._answer(200, {}, json.dumps({"files": files}).encode())
            elif parts[4:5] == ["commit"]:
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        content = base64.b64decode(line["value"]["content"])
                        hub.repos.setdefault(repo, {})[line["value"]["path"]] = content
                done = {"commitUrl": f"{hub.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT}
                self._answer(200, {}, json.dumps(done | {"success": True}).encode())
            else:  # the check of a card's head
                self._answer(200, {}, b'{"errors": [], "warnings": []}')

        def _listing(self, repo: str, revision: str, is_tree: bool) -> None:
            if repo not in hub.repos:
                self._answer(404, {"X-Error-Code": "RepoNotFound"})
            elif repo in hub.broken:
                self._answer(500, {})
            elif repo in hub.gated:
                self._answer(403, {"X-Error-Code": "GatedRepo"})
            elif revision not in ("main", "v1", hub.commit):
                self._answer(404, {"X-Error-Code": "RevisionNotFound"})
            else:
                names = sorted(hub.repos[repo])
                body: Any = {
                    "id": repo,
                    "sha": hub.commit,
                    "siblings": [{"rfilename": n} for n in names],
                    "cardData": hub.cards.get(repo, {}),
                }
                if is_tree:
                    body = [
                        {"type": "file", "path": n, "oid": n, "size": len(hub.repos[repo][n])}
                        for n in names
                    ]
                self._answer(200, {}, json.dumps(body).encode())

        def _file(self, repo: str, revision: str, name: str) -> None:
            content = hub.repos.get(repo, {}).get(name)
            if content is None or revision != hub.commit:
                self._answer(404, {"X-Error-Code": "EntryNotFound"})
            else:
                digest = hashlib.sha256(content).hexdigest()
                self._answer(200, {"X-Repo-Commit": hub.commit, "ETag": f'"{digest}"'}, content)

        def _answer(self, status: int, headers: dict[str, str], body: bytes = b"") -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


@contextlib.contextmanager
def serve_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub that this process, and those it starts, take for the real one."""
    from huggingface_hub import constants

    held = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler(held))
    held.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    monkeypatch.setenv("HF_ENDPOINT", held.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_OFFLINE", "HF_TOKEN", "HF_HUB_CACHE"):
        monkeypatch.delenv(name, raising=False)
    # Read when the library is imported, which may be long ago.
    template = f"{held.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", held.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    yield held
    server.shutdown()
    server.server_close()
    thread.join()
