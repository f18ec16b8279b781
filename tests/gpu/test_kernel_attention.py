"""The tests of tests/templates/triton/test_attention.py, on the GPU."""

from __future__ import annotations

import pytest

from tests.templates.triton.test_attention import *  # noqa: F403

pytestmark = pytest.mark.gpu
