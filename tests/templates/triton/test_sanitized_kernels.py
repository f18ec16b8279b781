"""The script of tests/gpu/test_sanitizer.py runs, here in Triton's interpreter."""

from __future__ import annotations

import sys

import pytest

from tests.gpu import sanitized_kernels


@pytest.mark.slow
def test_every_kernel_gives_finite_results(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["sanitized_kernels", "cpu"])
    sanitized_kernels.main()
    assert len(capsys.readouterr().out.splitlines()) == 11
