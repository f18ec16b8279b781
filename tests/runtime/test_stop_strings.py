"""Stop strings in text that comes in pieces."""

from __future__ import annotations

import random

import pytest

from octavo.runtime.stop_strings import StopStrings


def feed_all(stops: list[str], pieces: list[str], **options: bool) -> tuple[list[str], str | None]:
    checker = StopStrings(stops, include_in_output=options.get("include", False))
    shown = []
    for piece in pieces:
        shown.append(checker.feed(piece))
        if checker.matched is not None:
            return shown, checker.matched
    return [*shown, checker.flush()], None


@pytest.mark.parametrize(
    ("stops", "pieces", "expected"),
    [
        ([], ["ab", "c"], (["ab", "c", ""], None)),
        (["###"], ["a#", "#", "b"], (["a", "", "##b", ""], None)),
        (["###"], ["a#", "#", "#b"], (["a", "", ""], "###")),
        (["###"], ["a##"], (["a", "##"], None)),
        (["stop"], ["xsto", "px"], (["x", ""], "stop")),
        # A false start that holds a true one: nothing of it may leak.
        (["aab"], ["aa", "ab"], (["", "a"], "aab")),
        # Of two that match, the one that begins first, whatever the order of the list.
        (["cd", "bc"], ["abcd"], (["a"], "bc")),
        (["b", "bc"], ["abc"], (["a"], "b")),
        (["。", "🙂🙂"], ["好🙂", "x🙂", "🙂"], (["好", "🙂x", ""], "🙂🙂")),
    ],
)
def test_what_is_shown_and_when(
    stops: list[str], pieces: list[str], expected: tuple[list[str], str | None]
) -> None:
    assert feed_all(stops, pieces) == expected


def test_the_stop_string_can_be_included_and_nothing_after_it() -> None:
    assert feed_all(["##"], ["a#", "#b"], include=True) == (["a", "##"], "##")


def test_pieces_do_not_matter_and_no_prefix_leaks() -> None:
    rng = random.Random(0)
    for _ in range(2000):
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(2)]
        text = "".join(rng.choices("abc", k=12))
        cuts = sorted(rng.sample(range(13), 3))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, 12], strict=True)]
        shown, matched = feed_all(stops, [piece for piece in pieces if piece])
        ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
        if not ends:
            assert ("".join(shown), matched) == (text, None)
            continue
        assert matched is not None
        begin = len("".join(shown))
        assert text.startswith(matched, begin)
        assert all(stop not in text[:begin] for stop in stops)
