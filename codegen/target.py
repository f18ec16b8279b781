"""Targets: what kernels are made for, and which dtypes each has kernels for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from octavo.ir.errors import OctavoError


@dataclass(frozen=True)
class Target:
    """A target by name, and the folder of ``templates/`` its kernels are rendered from."""

    name: str
    templates: str
    dtypes: tuple[str, ...]

    def check_dtype(self, dtype: str) -> None:
        """Raise OctavoError unless there are kernels for models of this dtype."""
        if dtype not in self.dtypes:
            raise OctavoError(
                f"target {self.name} has no kernels for {dtype}; choose --dtype from "
                f"{', '.join(self.dtypes)}"
            )


TARGETS = {"cpu": Target("cpu", "cpu", ("f32", "bf16"))}
_FORESEEN = re.compile(r"cuda(:sm_\d+)?|hip(:gfx\w+)?")


def resolve_target(name: str) -> Target:
    """A target from what the user wrote; ``auto`` is what this machine can run.

    Raises OctavoError for a target without kernels and for an unknown name.
    """
    if name == "auto":
        return TARGETS["cpu"]
    if name in TARGETS:
        return TARGETS[name]
    if _FORESEEN.fullmatch(name):
        raise OctavoError(f"kernels for {name} are not there yet; use --target cpu")
    raise OctavoError(f"unknown target {name!r}; choose from auto, {', '.join(TARGETS)}")
