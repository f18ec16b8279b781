"""Commands whose name is two words: ``octavo bench schedule`` beside ``octavo bench MODEL``."""

from __future__ import annotations

from typing import Any

from typer.core import TyperGroup


class TwoWordGroup(TyperGroup):
    """Looks for a command of the first two words before one of the first.

    A model directory of the second word's name is still reached as ``./schedule``.
    """

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The name, the command, and the arguments that are left for it."""
        name = " ".join(args[:2])
        if len(args) > 1 and name in self.commands:
            return name, self.commands[name], args[2:]
        return super().resolve_command(ctx, args)
