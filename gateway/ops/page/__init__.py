"""The live page: static files without a build step, which load nothing from other servers."""

from __future__ import annotations

from functools import cache
from importlib import resources

from aiohttp import web

PAGE = "page"  # the folder of the live page's files, also in the paths of the admin API
KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}

# With these headers the browser loads and runs nothing but the page's own files, whatever text gets into the page.
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
                               "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}  # fmt: skip


def page_file(name: str) -> web.Response:
    """Return the answer with one of the live page's files. Raises HTTPNotFound if there is no such file."""
    found = _files().get(name)
    if found is None:
        raise web.HTTPNotFound
    kind, text = found
    return web.Response(text=text, content_type=kind, headers=HEADERS)


@cache
def _files() -> dict[str, tuple[str, str]]:
    return {
        one.name: (KINDS[suffix], one.read_text(encoding="utf-8"))
        for one in resources.files(__name__).iterdir()
        if (suffix := "." + one.name.rpartition(".")[2]) in KINDS
    }
