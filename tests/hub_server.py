"""A Hub on this machine: the part of its protocol by which models are downloaded, and what can go wrong with it.

    GET  /api/models/ORG/NAME/revision/REV?blobs=true   commit, and every file with size and digests
    HEAD /ORG/NAME/resolve/REV/FILE                     commit, size, ETag
    GET  /ORG/NAME/resolve/REV/FILE                     a small file, or a redirect (LFS) to ...
    GET  /cdn/DIGEST                                    ... its bytes; ranges

python -m tests.hub_server DIR --host 0.0.0.0 --port 8080    serves DIR/ORG/NAME/*
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import unquote, urlsplit

_LFS = (".safetensors", ".bin", ".pth", ".gguf", ".model", "tokenizer.json")
_CHUNK = 1 << 16


@dataclass
class Repo:
    """A repository of one commit.

    Attributes:
        files: name -> content.
        commit: its only one.
        branches: names of it.
        tokens: that may read it; empty for everybody.
        is_gated: everybody may look, and only `tokens` may read files.
        sizes: told instead of the true ones; None for none told.
        xet: URL of a storage that has large files by Xet's protocol, too; "" for none.
    """

    files: dict[str, bytes]
    commit: str = ""
    branches: tuple[str, ...] = ("main",)
    tokens: tuple[str, ...] = ()
    is_gated: bool = False
    sizes: dict[str, int | None] = field(default_factory=dict)
    xet: str = ""

    def __post_init__(self) -> None:
        if not self.commit:
            text = "".join(f"{name} {_sha256(content)}" for name, content in sorted(self.files.items()))
            self.commit = hashlib.sha1(text.encode()).hexdigest()


@dataclass
class Fault:
    """What happens to requests whose path matches.

    Attributes:
        pattern: regular expression, found anywhere in METHOD PATH.
        times: how often.
        status: answered instead; 0 for none.
        cut: bytes of the body after which the connection is closed; -1 for none.
        change: a byte of the content is another one.
        stall_s: before the answer.
        bytes_per_s: of the body; 0 for no limit.
        body: answered instead, with status.
    """

    pattern: str
    times: int = 10**9
    status: int = 0
    cut: int = -1
    change: bool = False
    stall_s: float = 0.0
    bytes_per_s: float = 0.0
    body: bytes = b""


@dataclass
class HubServer:
    """A server in a thread, as long as the block lasts.

    Attributes:
        repos: name -> repository.
        tokens: that are valid.
        faults: the first that matches counts.
        seen: "METHOD PATH" and the range that was asked for, in order.
        sent: bytes of bodies by path.
        host, port: to listen on.
        cdn: host that large files are on, another name of this one; "" if there is none.
    """

    repos: dict[str, Repo] = field(default_factory=dict)
    tokens: tuple[str, ...] = ()
    faults: list[Fault] = field(default_factory=list)
    seen: list[tuple[str, str]] = field(default_factory=list)
    sent: Counter[str] = field(default_factory=Counter)
    host: str = "127.0.0.1"
    port: int = 0
    cdn: str = "localhost"

    def __enter__(self) -> HubServer:
        self._server = ThreadingHTTPServer((self.host, self.port), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self._server.server_port}"

    @property
    def cdn_url(self) -> str:
        return f"http://{self.cdn}:{self._server.server_port}"

    def add(self, name: str, folder: Path, **settings: Any) -> Repo:
        """Publish a directory."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repos[name] = Repo(files, **settings)
        return self.repos[name]

    def fault_of(self, request: str) -> Fault | None:
        for fault in self.faults:
            if fault.times > 0 and re.search(fault.pattern, request):
                fault.times -= 1
                return fault
        return None

    def asked(self, pattern: str) -> list[str]:
        """Requests that match, in order."""
        return [request for request, _ in self.seen if re.search(pattern, request)]


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def _answer(self) -> None:
            path = unquote(urlsplit(self.path).path)
            request = f"{self.command} {path}"
            hub.seen.append((request, self.headers.get("Range", "")))
            self._fault = hub.fault_of(request)
            if self._fault is not None:
                time.sleep(self._fault.stall_s)
                if self._fault.status:
                    return self._send(self._fault.status, self._fault.body)
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+?)(?:/revision/(.+))?", path):
                self._info(found[1], found[2] or "main")
            elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._file(found[1], found[2], found[3])
            elif found := re.fullmatch(r"/xet/(.+)", path):
                expiry = str(int(time.time()) + 3600)
                token = {"X-Xet-Access-Token": "t", "X-Xet-Token-Expiration": expiry}
                self._send(200, b"", {**token, "X-Xet-Cas-Url": hub.repos[found[1]].xet})
            elif found := re.fullmatch(r"/cdn/([0-9a-f]{64})", path):
                self._content(found[1])
            else:
                self._send(404, b"")

        def _token(self) -> str:
            return self.headers.get("Authorization", "").removeprefix("Bearer ")

        def _repo(self, name: str, revision: str, *, reads: bool) -> Repo | None:
            token, repo = self._token(), hub.repos.get(name)
            if token and token not in hub.tokens:
                self._refuse(401, "", "Invalid credentials in Authorization header")
            elif repo is None or (repo.tokens and token not in repo.tokens and not repo.is_gated):
                if token:
                    self._refuse(404, "RepoNotFound", "Repository not found")
                else:
                    self._refuse(401, "", "Invalid username or password.")
            elif reads and repo.is_gated and token not in repo.tokens:
                self._refuse(403 if token else 401, "GatedRepo", f"Access to model {name} is restricted.")
            elif revision not in (repo.commit, *repo.branches):
                self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            else:
                return repo
            return None

        def _info(self, name: str, revision: str) -> None:
            repo = self._repo(name, revision, reads=False)
            if repo is None:
                return
            siblings = [
                _sibling(file, content, repo.sizes.get(file, len(content))) for file, content in repo.files.items()
            ]
            body = {"id": name, "modelId": name, "sha": repo.commit, "siblings": siblings, "gated": repo.is_gated}
            self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

        def _file(self, name: str, revision: str, file: str) -> None:
            repo = self._repo(name, revision, reads=True)
            if repo is None:
                return
            if file not in repo.files:
                return self._refuse(404, "EntryNotFound", "Entry not found", {"X-Repo-Commit": repo.commit})
            content = repo.files[file]
            headers = {"X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
            if file.endswith(_LFS):
                digest = _sha256(content)
                if not hub.cdn:
                    return self._body(content, {**headers, "ETag": f'"{digest}"'})
                headers |= {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(content))}
                if repo.xet:
                    headers |= {"X-Xet-Hash": digest, "X-Xet-Refresh-Route": f"{hub.url}/xet/{name}"}
                return self._send(302, b"", {**headers, "Location": f"{hub.cdn_url}/cdn/{digest}"})
            self._body(content, {**headers, "ETag": f'"{_git_sha1(content)}"'})

        def _content(self, digest: str) -> None:
            assert not self._token(), "the token is for the Hub alone"
            known = {_sha256(content): content for repo in hub.repos.values() for content in repo.files.values()}
            self._body(known[digest], {"ETag": f'"{digest}"', "Accept-Ranges": "bytes"})

        def _body(self, content: bytes, headers: dict[str, str]) -> None:
            if self._fault is not None and self._fault.change:
                content = content[:-1] + bytes([content[-1] ^ 1])
            if found := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
                begin, end = int(found[1]), min(int(found[2] or len(content)) + 1, len(content))
                headers = {**headers, "Content-Range": f"bytes {begin}-{end - 1}/{len(content)}"}
                return self._send(206, content[begin:end], headers)
            self._send(200, content, headers)

        def _refuse(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
            errors = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
            self._send(status, json.dumps({"error": message}).encode(), {**errors, **(headers or {})})

        def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "HEAD":
                return
            fault = self._fault or Fault("")
            end = len(body) if fault.cut < 0 else min(fault.cut, len(body))
            for begin in range(0, end, _CHUNK):
                chunk = body[begin : min(begin + _CHUNK, end)]
                try:
                    self.wfile.write(chunk)
                except OSError:  # the client has had enough
                    self.close_connection = True
                    return
                hub.sent[unquote(urlsplit(self.path).path)] += len(chunk)
                if fault.bytes_per_s:
                    time.sleep(len(chunk) / fault.bytes_per_s)
            if end < len(body):
                self.close_connection = True

    return Handler


def _sibling(name: str, content: bytes, size: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": name, "size": size, "blobId": _git_sha1(content)}
    if name.endswith(_LFS):
        found["lfs"] = {"sha256": _sha256(content), "size": len(content), "pointerSize": 134}
    return found


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _git_sha1(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    with HubServer(host=options.host, port=options.port, cdn="") as hub:
        for folder in options.folder.glob("*/*"):
            hub.add(f"{folder.parent.name}/{folder.name}", folder)
        print(hub.url, flush=True)
        while True:
            time.sleep(3600)


if __name__ == "__main__":
    main()
