"""The option that rewrites the expected halves of the cases."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--update-cases``."""
    parser.addoption(
        "--update-cases",
        action="store_true",
        help="rewrite the second halves of tests/passes/cases/*.ir with what the passes give",
    )
