"""Where things that can be made again are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """``$OCTAVO_CACHE``, else ``octavo`` in ``$XDG_CACHE_HOME``, else ``~/.cache/octavo``."""
    if own := os.environ.get("OCTAVO_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "octavo"
