"""Folding of repeated lines: exact, and as short as a reader wants it."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ir.fold import FoldError, expand, fold


def test_layers_become_one_body_with_holes():
    lines = [f"  %layers.{i}.mlp = op(%layers.{i - 1}.mlp, slot={2 * i + 3})" for i in range(1, 31)]
    assert fold(lines) == [
        "  repeat i = 1..30 {",
        "    %layers.{i}.mlp = op(%layers.{i-1}.mlp, slot={2*i+3})",
        "  }",
    ]


def test_alternating_layers_become_a_body_of_two():
    window = {0: ", window=8", 1: ""}
    lines = [f"%l.{i} = attention(%l.{i}.q{window[i % 2]})" for i in range(8)]
    assert fold(lines) == [
        "repeat i = 0..3 {",
        "  %l.{2*i} = attention(%l.{2*i}.q, window=8)",
        "  %l.{2*i+1} = attention(%l.{2*i+1}.q)",
        "}",
    ]


def test_a_body_starts_where_a_layer_starts():
    # Layer 0 reads the embedding, so the first run that matches starts in the middle of a layer.
    lines = ["%a.0 = norm(%embed)", "%b.0 = mlp(%a.0)", "%c.0 = add(%b.0)"]
    for i in range(1, 6):
        lines += [f"%a.{i} = norm(%c.{i - 1})", f"%b.{i} = mlp(%a.{i})", f"%c.{i} = add(%b.{i})"]
    lines.append("%out = head(%c.5)")
    assert fold(lines) == [
        *lines[:3],
        "repeat i = 1..5 {",
        "  %a.{i} = norm(%c.{i-1})",
        "  %b.{i} = mlp(%a.{i})",
        "  %c.{i} = add(%b.{i})",
        "}",
        "%out = head(%c.5)",
    ]


def test_falling_numbers_get_a_negative_step():
    assert fold(["a 1 9", "a 2 8", "a 3 7", "a 4 6"]) == [
        "repeat i = 1..4 {",
        "  a {i} {-i+10}",
        "}",
    ]


@pytest.mark.parametrize(
    "lines",
    [
        ["a 1", "a 2"],  # two are no repetition
        ["a 1", "a 2", "a 3"],  # three lines save nothing: head and brace take two
        ["a 1", "a 2", "a 4", "a 8", "a 16"],  # no constant step
        ['a 1 "{i}"', 'a 2 "{i}"', 'a 3 "{i}"', 'a 4 "{i}"'],  # a brace would be taken for a hole
        ["a 01", "a 02", "a 03", "a 04"],  # a hole would lose the zero
    ],
)
def test_what_must_not_fold_stays(lines):
    assert fold(lines) == lines


def test_constant_lines_fold_without_holes():
    assert fold(["x", "y"] * 4) == ["repeat i = 0..3 {", "  x", "  y", "}"]


_LINE = st.one_of(
    st.sampled_from(["a", "  b {", 'c "{i}"', "", "d 007", "e 1e-05"]),
    st.builds("f {} %g.{}~{}".format, *[st.integers(0, 12)] * 3),
)
_BLOCK = st.tuples(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 9)), max_size=4),
    st.integers(1, 6),
).map(
    lambda drawn: [
        f"%{word}.{step * i + start} = {word}()"
        for i in range(drawn[1])
        for word, step, start in drawn[0]
    ]
)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.one_of(st.lists(_LINE, max_size=5), _BLOCK), max_size=8))
def test_expansion_gives_the_lines_back(blocks):
    lines = [line for block in blocks for line in block]
    folded = fold(lines)
    assert expand(folded) == lines
    assert len(folded) <= len(lines)


def test_three_thousand_lines_take_less_than_a_second():
    body = [f"%layers.{{i}}.{name} = op{name}(%layers.{{i}}.x, dim=3)" for name in range(100)]
    lines = [line.replace("{i}", str(i)) for i in range(30) for line in body]
    started = time.process_time()
    assert len(fold(lines)) == 102
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize(
    ("lines", "line", "reason"),
    [
        (["x", "repeat i = 0..3"], 1, "expected `repeat i = FIRST..LAST {`"),
        (["repeat i = 0..3 {", "a"], 0, "never closed"),
        (["repeat i = 0..3 {", "repeat i = 0..1 {", "}", "}"], 1, "inside a repeat"),
    ],
)
def test_malformed_blocks_are_errors_at_their_line(lines, line, reason):
    with pytest.raises(FoldError, match=reason) as caught:
        expand(lines)
    assert caught.value.line == line
