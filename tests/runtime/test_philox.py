"""Random numbers against the published vectors."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.runtime.philox import philox4x32, uniforms

# kat_vectors of Random123 (Salmon et al. 2011), "philox4x32 10": counter, key, result.
VECTORS = [
    (
        "00000000 00000000 00000000 00000000",
        "00000000 00000000",
        "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    ),
    (
        "ffffffff ffffffff ffffffff ffffffff",
        "ffffffff ffffffff",
        "408f276d 41c83b0e a20bc7c6 6d5451fd",
    ),
    (
        "243f6a88 85a308d3 13198a2e 03707344",
        "a4093822 299f31d0",
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_known_answers(counter: str, key: str, expected: str) -> None:
    result = philox4x32(
        np.array(words(counter), dtype=np.uint64)[:, None],
        np.array(words(key), dtype=np.uint64)[:, None],
    )
    assert result[:, 0].tolist() == words(expected)


def test_a_uniform_is_the_first_53_bits_of_its_block() -> None:
    high, low = 0xD16CFE09, 0x94FDCCEB  # the third vector
    expected = ((high >> 5) * 2**26 + (low >> 6)) / 2**53
    seed, stream, position = 0x299F31D0A4093822, 0x0370734413198A2E, 0x85A308D3243F6A88
    assert uniforms([seed], [stream], [position]).tolist() == [expected]


def test_uniforms_are_uniform_and_depend_on_each_coordinate() -> None:
    count = 20000
    base = uniforms([1] * count, [2] * count, range(count))
    others = [
        uniforms([2] * count, [2] * count, range(count)),
        uniforms([1] * count, [3] * count, range(count)),
        uniforms([1] * count, [2] * count, range(1, count + 1)),
    ]
    counts, _ = np.histogram(base, bins=20, range=(0, 1))
    # 19 degrees of freedom: 43.8 is passed by chance once in a thousand.
    assert ((counts - count / 20) ** 2 / (count / 20)).sum() < 43.8
    for other in others:
        assert abs(np.corrcoef(base, other)[0, 1]) < 0.03


def test_negative_seeds_are_seeds() -> None:
    assert uniforms([-5], [0], [0]) == uniforms([2**64 - 5], [0], [0])
