"""A proxy that plants a fault in the prefix cache of a right server, to show that `raycache cachecheck` finds it there.

    python -m benchmarks.faulty_proxy http://127.0.0.1:8000 --fault order --port 8001
    raycache cachecheck http://127.0.0.1:8001

Faults:

    order   an answer from the cache is that to the prompt with its second and third line exchanged, like two pages
            in the wrong order; `--one-in 10`: one hit in ten
    salts   tenants share the cache: all salts become one of eight

Only /v1/completions is changed; everything else passes as it is.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Sequence
from typing import Any

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

_COMPLETIONS = "/v1/completions"
_JSON = {"content-type": "application/json"}


class Proxy:
    """Forwards requests; `app` is the ASGI application.

    Args:
        url: of the right server.
        fault: "order" or "salts".
        one_in: of so many hits, one is wrong.
    """

    def __init__(self, url: str, *, fault: str, one_in: int) -> None:
        self._http = httpx2.AsyncClient(base_url=url, timeout=600, trust_env=False)
        self._fault, self._one_in = fault, one_in
        self._hits = 0
        self.app = Starlette(routes=[Route("/{path:path}", self._forward, methods=["GET", "POST"])])

    async def _forward(self, request: Request) -> Response:
        content, path = await request.body(), request.url.path
        if path == _COMPLETIONS and not (body := json.loads(content)).get("stream"):
            return await self._complete(body)
        answer = await self._http.request(request.method, path, content=content, headers=_JSON)
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    async def _complete(self, body: dict[str, Any]) -> Response:
        if self._fault == "salts" and "cache_salt" in body:
            body["cache_salt"] = str(zlib.crc32(body["cache_salt"].encode()) % 8)
        right = await self._http.post(_COMPLETIONS, json=body)
        answer = right.json()
        details = answer.get("usage", {}).get("prompt_tokens_details") or {}
        if self._fault == "order" and details.get("cached_tokens"):
            self._hits += 1
            if self._hits % self._one_in == 0:
                wrong = await self._http.post(_COMPLETIONS, json={**body, "prompt": _exchanged(body["prompt"])})
                answer["choices"] = wrong.json()["choices"]
        return Response(json.dumps(answer), right.status_code, media_type="application/json")


def _exchanged(prompt: str) -> str:
    lines = prompt.splitlines(keepends=True)
    return "".join((lines[0], *lines[2:0:-1], *lines[3:]))


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="of a server that is right")
    parser.add_argument("--fault", choices=("order", "salts"), default="order")
    parser.add_argument("--one-in", type=int, default=1, help="of so many hits, one is wrong")
    parser.add_argument("--port", type=int, default=8001)
    options = parser.parse_args(argv)
    proxy = Proxy(options.url, fault=options.fault, one_in=options.one_in)
    uvicorn.run(proxy.app, host="127.0.0.1", port=options.port, log_level="warning")


if __name__ == "__main__":
    main()
