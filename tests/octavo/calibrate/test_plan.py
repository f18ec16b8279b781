"""What of a text a calibration uses, and what is said when it is less than was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from octavo.calibrate.calibrate import Calibration
from octavo.calibrate.plan import CalibrationRequest, read_samples
from octavo.calibrate.sequences import CalibrationOptions
from octavo.ir.errors import OctavoError
from octavo.runtime.tokenizer import Tokenizer
from tests.runtime.toy_artifact import byte_tokenizer


def request_for(path: Path, num_tokens: int, num_samples: int, length: int) -> CalibrationRequest:
    """Of a text of so many bytes, which are its tokens."""
    path.write_text("x" * num_tokens)
    samples = CalibrationOptions(num_samples, length)
    return CalibrationRequest(path, Calibration("gptq", samples))


@pytest.mark.parametrize(
    ("num_tokens", "asked", "max_position", "found"),
    [
        (192, (3, 64), 64, (3, 64)),
        (191, (3, 64), 64, (2, 64)),
        (192, (3, 64), 63, (3, 63)),
        (192, (4, 64), 64, (3, 64)),
    ],
)
def test_fewer_or_shorter_samples_are_said(
    num_tokens: int,
    asked: tuple[int, int],
    max_position: int,
    found: tuple[int, int],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    request = request_for(tmp_path / "text.txt", num_tokens, *asked)
    samples = read_samples(request, Tokenizer(byte_tokenizer(), {}, {}), max_position)
    assert (len(samples), {len(ids) for ids in samples}) == (found[0], {found[1]})
    if found == asked:
        assert caplog.messages == []
        return
    [notice] = caplog.messages
    assert notice == (
        f"calibrating on {found[0]} samples of {found[1]} tokens, not on {asked[0]} of {asked[1]}:"
        f" text.txt has {num_tokens} tokens, and the model takes {max_position} at most"
    )


def test_the_passage_that_comes_with_octavo_is_used_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples = read_samples(CalibrationRequest(), Tokenizer(byte_tokenizer(), {}, {}), 256)
    assert (len(samples), len(samples[0])) == (8, 256)
    assert caplog.messages == []


@pytest.mark.parametrize("num_tokens", [0, 63])
def test_no_sample_at_all(num_tokens: int, tmp_path: Path) -> None:
    request = request_for(tmp_path / "text.txt", num_tokens, 4, 64)
    reason = f"has {num_tokens} tokens, expected at least one sample of 64; .*--calibration-length"
    with pytest.raises(OctavoError, match=reason):
        read_samples(request, Tokenizer(byte_tokenizer(), {}, {}), 64)
