"""A small Hugging Face hub on loopback, which speaks what ``huggingface_hub`` asks to download a model."""

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants


@dataclass
class Hub:
    """Repositories by their ids: each is a folder, all of whose files are in one commit on the branch ``main``.

    ``tokens`` are the tokens that open gated repositories; ``seen`` the requests so far: method, path and token.
    """

    url: str
    repositories: dict[str, Path] = field(default_factory=dict)
    gated: dict[str, str] = field(default_factory=dict)
    seen: list[tuple[str, str, str | None]] = field(default_factory=list)

    def downloaded(self) -> list[str]:
        """Names of the files that were sent."""
        return sorted(path.partition(f"/{commit_of(path[1:])}/")[2] for kind, path, _ in self.seen
                      if kind == "GET" and "/resolve/" in path)  # fmt: skip


def commit_of(text: str) -> str:
    """The only commit of the repository that a path begins with."""
    return hashlib.sha1("/".join(text.split("/")[:2]).encode()).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        token = self.headers.get("Authorization")
        self.hub.seen.append((self.command, path, token))
        is_api = path.startswith("/api/models/")
        words = path.removeprefix("/api/models").split("/")[1:]
        if len(words) < 4:  # the library looks for its own new releases, say
            return self._refuse(404, "EntryNotFound")
        repo_id, action, revision, name = "/".join(words[:2]), words[2], words[3], "/".join(words[4:])
        folder, commit = self.hub.repositories.get(repo_id), commit_of(repo_id)
        if folder is None:
            return self._refuse(401, "RepoNotFound")
        if revision not in ("main", commit):
            return self._refuse(404, "RevisionNotFound")
        if is_api and action == "revision":
            return self._send_json({"id": repo_id, "sha": commit, "siblings": []})
        if is_api:
            return self._send_json([
                {"type": "file", "path": str(file.relative_to(folder)), "size": file.stat().st_size, "oid": _etag(file)}
                for file in sorted(file for file in folder.rglob("*") if file.is_file())
            ])  # fmt: skip
        if token != self.hub.gated.get(repo_id, token):
            return self._refuse(403, "GatedRepo")
        return self._send((folder / name).read_bytes(), {"ETag": f'"{_etag(folder / name)}"', "X-Repo-Commit": commit})

    def _refuse(self, status: int, code: str) -> None:
        self._send(b"", {"X-Error-Code": code}, status)

    def _send_json(self, value: object) -> None:
        self._send(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _send(self, content: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def _etag(file: Path) -> str:
    return hashlib.sha1(file.read_bytes()).hexdigest()


@contextmanager
def serving_hub() -> Iterator[Hub]:
    """A hub without repositories, on a free port."""
    handler = type("Handler", (_Handler,), {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub = handler.hub = Hub(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def point_to(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """What HF_ENDPOINT and HF_HUB_CACHE do, in a process that has imported the library."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
