"""The tests of tests/templates/triton/test_kv_codes.py, on the GPU."""

from __future__ import annotations

import pytest

from tests.templates.triton.test_kv_codes import *  # noqa: F403

pytestmark = pytest.mark.gpu
