"""GET /ui: a page that shows the cache and its use, in a browser.

The files hold no data, so with API keys they need none; the page asks for a key and sends it with its requests. Without
keys they are served to this machine only, as what they ask for is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from launch.http.auth import check_operator
from raycache.config import Config

UI_PATH = "/ui"
_FILES = {
    UI_PATH: ("index.html", "text/html"),
    f"{UI_PATH}/style.css": ("style.css", "text/css"),
    f"{UI_PATH}/app.js": ("app.js", "text/javascript"),
}
_POLICY = (
    "default-src 'none'",
    "script-src 'self'",
    "style-src 'self'",
    "connect-src 'self'",
    "img-src data:",
    "base-uri 'none'",
    "form-action 'none'",
    "frame-ancestors 'none'",
    "require-trusted-types-for 'script'",
    "trusted-types 'none'",
)
_HEADERS = {
    "Content-Security-Policy": "; ".join(_POLICY),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class UiPage:
    """The page and its files."""

    def __init__(self, config: Config) -> None:
        self._config = config

    def routes(self) -> list[Route]:
        """Routes for the application."""
        pages = [Route(path, self._page(name, kind)) for path, (name, kind) in _FILES.items()]
        return [*pages, Route(f"{UI_PATH}/", self._redirect)]

    def _page(self, name: str, kind: str) -> Callable[[Request], Awaitable[Response]]:
        content = files("launch.http").joinpath("ui", name).read_bytes()

        async def show(request: Request) -> Response:
            check_operator(request, self._config)
            return Response(content, headers=_HEADERS, media_type=kind)

        return show

    async def _redirect(self, request: Request) -> Response:
        return RedirectResponse(f"..{UI_PATH}")  # relative, as all links of the page: there may be a prefix
