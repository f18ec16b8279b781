"""Every mistake in a text is one error with place, line and caret."""

from __future__ import annotations

import pytest

from octavo.ir.errors import ParseError
from octavo.ir.parser import parse_graph

TEXT = """graph @g(%x: f32[T, 64], %r: f32[T, 64], @w: f32[64]) {
  %s: f32[T, 64] = add(%x, %r)
  %n: f32[T, 64] = rms_norm(%s, @w, eps=1e-05)
  return %n, %s
}
"""


def error(text: str) -> str:
    with pytest.raises(ParseError) as caught:
        parse_graph(text, "case.ir", first_line=10)
    return str(caught.value)


def test_an_error_shows_file_line_column_and_caret():
    assert error(TEXT.replace("add(", "ad(")) == (
        "case.ir:11:20: unknown op 'ad'; did you mean add?\n"
        "  %s: f32[T, 64] = ad(%x, %r)\n"
        "                   ^"
    )


@pytest.mark.parametrize(
    ("old", "new", "place", "reason"),
    [
        ("graph", "grph", "10:1", "expected `graph`, got `grph`"),
        ("@g(", "g(", "10:7", "expected the graph's name"),
        ("%x: f32[T, 64],", "%x: f32[T, 64", "10:24", "expected `,` or `]`, got `%r`"),
        ("%x: f32", "%x: f33", "10:14", "unknown dtype; expected one of f64, f32"),
        ("%x: f32[T, 64],", "%x: f32[T, 0.5],", "10:21", "expected a dim"),
        ("%r: f32[T, 64]", "%x: f32[T, 64]", "10:26", "`%x` is defined twice"),
        ("@w: f32[64]", "@w: kv<f32>", "10:42", "a weight must be a tensor"),
        ("add(%x, %r)", "add(%x, %q)", "11:28", "`%q` is not defined before this line"),
        ("add(%x, %r)", "add(%x, %r", "12:3", "expected `,` or `)`, got `%n`"),
        ("add(%x, %r)", "add(%x %r)", "11:27", "expected `,` or `)`, got `%r`"),
        ("add(%x, %r)", "add(%x, %r, %x)", "11:20", "add takes 1 to 2 operands, got 3"),
        ("add(%x, %r)", "add(none, %r)", "11:20", "operand 'x' is missing"),
        ("add(%x, %r)", "add(scalar=2.0, %r)", "11:36", "operands come before attributes"),
        ("add(%x, %r)", "add(%x)", "11:20", "exactly one of the second operand"),
        ("add(%x, %r)", "add(%x, @w~1)", "11:28", "did you mean @w?"),
        ("add(%x, %r)", "aten.no_such.default(%x)", "11:20", "has no op 'aten.no_such.default'"),
        (
            "%s: f32[T, 64] =",
            "%s: f32[T, 65] =",
            "11:3",
            "declared f32[T, 65], but add gives f32[T, 64]",
        ),
        (
            "%s: f32[T, 64] =",
            "%s: f32[T, 64], %t: f32[T, 64] =",
            "11:36",
            "add gives 1 results, not 2",
        ),
        ("%s: f32[T, 64] =", "%s =", "11:6", "expected `:`, got `=`"),
        ("%s: f32[T, 64] =", "%a-b: f32[T, 64] =", "11:3", "a name is made of letters"),
        ("%n: f32[T, 64] =", "%s: f32[T, 64] =", "12:3", "`%s` is defined twice"),
        ("%n: f32[T, 64] =", "@n: f32[T, 64] =", "12:3", "expected a name with `%` in the step"),
        ("eps=1e-05", "esp=1e-05", "12:20", "rms_norm has no attribute 'esp'; it has ['eps'"),
        (", eps=1e-05", "", "12:20", "rms_norm needs the attribute 'eps'"),
        ("eps=1e-05", "eps=1e-05, eps=1.0", "12:48", "the attribute 'eps' is given twice"),
        ("eps=1e-05", "eps=", "12:41", "expected a number, string, truth value"),
        ("eps=1e-05", "eps=?", "12:41", "unexpected character '?'"),
        ("return %n, %s", "retrun %n, %s", "13:3", "expected a result or `return`, got `retrun`"),
        ("return %n, %s", "return %n, %q", "13:14", "`%q` is not defined"),
        ("return %n, %s\n}", "return %n, %s\n", "14:1", "expected `}`, got the end of the text"),
        ("%s\n}", "%s\n}\n}", "15:1", "expected nothing after the graph"),
        ("  return", "  repeat 3 {\n  return", "13:3", "expected `repeat i = FIRST..LAST {`"),
        ("%n, %s\n}", "%n, %s\n  repeat i = 0..2 {", "14:3", "this repeat is never closed"),
    ],
)
def test_mistakes(old, new, place, reason):
    assert old in TEXT
    message = error(TEXT.replace(old, new, 1))
    assert message.startswith(f"case.ir:{place}: ")
    assert reason in message.splitlines()[0]
    line, caret = message.splitlines()[1:]
    assert caret.index("^") <= len(line)


def test_a_weight_cannot_depend_on_the_step():
    text = "graph @g(%x: f32[4]) {\n weights { @w: f32[4] = neg(%x) }\n return @w\n}"
    assert "case.ir:11:25: a weight cannot depend on the step's %x" in error(text)


def test_an_error_inside_a_repeat_names_the_line_and_the_turn():
    text = (
        "graph @g(%x.0: f32[T]) {\n"
        "  repeat i = 1..3 {\n"
        "    %x.{i}: f32[T] = relu(%x.{2*i-2})\n"
        "  }\n"
        "  return %x.3\n"
        "}\n"
    )
    assert error(text).splitlines() == [
        "case.ir:12:23: `%x.2` is not defined before this line; did you mean %x.1? (at i = 2)",
        "  %x.2: f32[T] = relu(%x.2)",
        "                      ^",
    ]


def test_an_empty_text():
    assert error("").startswith("case.ir:10:1: expected `graph`, got the end of the text")
