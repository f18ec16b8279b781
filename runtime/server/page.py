"""The built-in page: one file, which loads nothing from elsewhere and may not."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import Response


def page() -> Response:
    """index.html, with a policy under which only its own script runs."""
    text = (files(__package__) / "index.html").read_text("utf-8")
    policy = (
        "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; "
        f"script-src {_hash_of('script', text)}; style-src {_hash_of('style', text)}"
    )
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }
    return Response(text, media_type="text/html", headers=headers)


def _hash_of(element: str, text: str) -> str:
    """The content of the one such element, as a Content-Security-Policy names it."""
    [content] = re.findall(f"<{element}>(.*?)</{element}>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    return f"'sha256-{digest}'"
