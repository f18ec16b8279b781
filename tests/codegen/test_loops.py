"""Runs of calls become loops, and only those that a loop means."""

from __future__ import annotations

from octavo.codegen.loops import CallText, fold_calls


def _fold(*calls: CallText, count: int | None = None) -> list[str]:
    lines = [call.statement(f"self.{call.body}s[{call.number}]") for call in calls]
    counts = {call.body: count or len(calls) for call in calls}
    return fold_calls(["before", *lines, "after"], dict(enumerate(calls, start=1)), counts)


def _layers(*numbers: int, first: str = "b.embed") -> list[CallText]:
    arguments = [first, *["h"] * (len(numbers) - 1)]
    return [
        CallText("layer", n, ("h",), (a, "plan")) for n, a in zip(numbers, arguments, strict=True)
    ]


def test_the_first_call_starts_the_loop() -> None:
    assert _fold(*_layers(0, 1, 2)) == [
        "before",
        "h = b.embed",
        "for w in self.layers:",
        "    h = self._layer(w, b, h, plan)",
        "after",
    ]


def test_part_of_the_layers_is_a_slice() -> None:
    assert _fold(*_layers(2, 3, 4, first="h"), count=7) == [
        "before",
        "for w in self.layers[2:5]:",
        "    h = self._layer(w, b, h, plan)",
        "after",
    ]


def test_two_calls_stay_calls() -> None:
    assert _fold(*_layers(0, 1)) == [
        "before",
        "h = self._layer(self.layers[0], b, b.embed, plan)",
        "h = self._layer(self.layers[1], b, h, plan)",
        "after",
    ]


def test_an_argument_that_is_not_handed_on_ends_the_loop() -> None:
    calls = [CallText("layer", n, ("h",), ("h", f"plan_{n}")) for n in range(4)]
    assert len(_fold(*calls)) == 6


def test_other_bodies_end_the_loop() -> None:
    calls = [*_layers(0, 1, 2), CallText("other", 0, ("h",), ("h", "plan"))]
    assert _fold(*calls, count=3)[-2:] == ["h = self._other(self.others[0], b, h, plan)", "after"]
