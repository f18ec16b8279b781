"""Rendering of kernel templates: one file for each distinct text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import jinja2

from octavo.codegen.kernels import Kernel
from octavo.codegen.pointwise import pointwise_kernel
from octavo.codegen.target import Target
from octavo.ir.types import DTYPES, TensorType


@dataclass(frozen=True)
class RenderedKernel:
    """One file under ``kernels/src``: module name, op, template, constants, text."""

    name: str
    op: str
    template: str
    constants: dict[str, Any]
    text: str

    @property
    def path(self) -> str:
        """Where it lies in the artifact."""
        return f"kernels/src/{self.name}.py"


@dataclass
class KernelSet:
    """The kernels of a program, rendered when first asked for."""

    target: Target
    rendered: dict[str, RenderedKernel] = field(default_factory=dict)  # by name

    def module(self, kernel: Kernel) -> str:
        """The module name of a kernel; equal texts share a module."""
        file = kernel.template or kernel.op
        template = f"{self.target.templates}/{file}.py.j2"
        constants = dict(kernel.constants)
        text = render_kernel(template, kernel.op, constants)
        for rendered in self.rendered.values():
            if rendered.text == text:
                return rendered.name
        stem = "_".join([file, *(re.sub(r"\W", "_", str(part)) for part in kernel.label)])
        taken = sum(bool(re.fullmatch(rf"{stem}(_v\d+)?", name)) for name in self.rendered)
        name = f"{stem}_v{taken + 1}" if taken else stem
        self.rendered[name] = RenderedKernel(name, kernel.op, template, constants, text)
        return name


@cache
def environment() -> jinja2.Environment:
    """Templates of the package; a hole with no value is an error."""
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("octavo.templates", ""),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    made.globals["torch_dtype"] = lambda name: str(DTYPES[name])
    made.globals["pointwise_kernel"] = pointwise_kernel
    return made


def render_kernel(template: str, op: str, constants: dict[str, Any]) -> str:
    """The text of a kernel, opened by its op, template and constants."""
    shown = " ".join(f"{name}={value}" for name, value in constants.items())
    header = f"# op: {op}\n# template: {template}\n# constants: {shown}\n"
    text = header + environment().get_template(template).render(constants)
    if not template.startswith("triton/"):
        return text
    # For whoever holds the module: what it is (inspect, the tuner).
    lines = [f"    {name!r}: {_literal(value)},\n" for name, value in constants.items()]
    return f"{text.rstrip()}\n\nOP = {op!r}\nCONSTANTS = {{\n{''.join(lines)}}}\n"


def _literal(value: Any) -> str:
    """A constant as Python; types of operands by their text."""
    if isinstance(value, TensorType):
        return repr(str(value))
    if isinstance(value, tuple):
        return f"({''.join(f'{_literal(item)}, ' for item in value)})"
    return repr(value)
