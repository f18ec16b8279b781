"""Targets: what kernels are made for, and which dtypes each has kernels for."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from octavo.codegen.cpu_rules import CPU_RULES
from octavo.codegen.kernels import KernelRules
from octavo.codegen.triton_rules import TRITON_RULES
from octavo.ir.errors import OctavoError
from octavo.ir.graph import Graph, Node, Value
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.types import SymDim, TensorType

# Compute capabilities with kernels; one in between runs the binaries of the one below or its own.
CUDA_ARCHS = (80, 86, 89, 90, 100, 120)


@dataclass(frozen=True)
class Target:
    """A target by name, and the folder of ``templates/`` its kernels are rendered from.

    ``kind`` is cpu or cuda; ``arch`` the compute capability times ten, None on a CPU.
    """

    name: str
    kind: str
    templates: str
    dtypes: tuple[str, ...]
    arch: int | None = None

    @property
    def rules(self) -> KernelRules:
        """Which op has which kernel."""
        return TRITON_RULES if self.kind == "cuda" else CPU_RULES

    @property
    def is_here(self) -> bool:
        """Whether this machine has the GPU that kernels are made for."""
        found = _this_gpu()
        return found is not None and found.arch == self.arch

    def why_no_kernel(self, scheme: QuantScheme) -> str | None:
        """Why the target cannot multiply by matrices of a scheme; None when it can.

        Asked of its rules, so that no list has to be kept beside them.
        """
        if scheme.codes == "f8e4m3" and self.arch is not None and self.arch < 89:
            return (
                f"{self.name} has no 8-bit floats, which {scheme} needs; choose int8, int4, or a"
                " target from sm_89 on"
            )
        if self.rules["linear"](_linear_of(scheme, self.dtypes[0])) is None:
            return f"{self.name} has no kernel for {scheme}; choose int8 or int4"
        return None

    def can_embed(self, scheme: QuantScheme) -> bool:
        """Whether the target looks rows up in matrices of a scheme."""
        if "quant_embedding" not in self.rules:
            return False
        graph = Graph("embedding")
        ids = graph.add_input("ids", TensorType("i64", (SymDim("T"),)))
        node = graph.append("quant_embedding", ids, _matrix(graph, scheme), dtype=self.dtypes[0])
        return self.rules["quant_embedding"](node) is not None

    def check_dtype(self, dtype: str) -> None:
        """Raise OctavoError unless there are kernels for models of this dtype."""
        if dtype not in self.dtypes:
            raise OctavoError(
                f"target {self.name} has no kernels for {dtype}; choose --dtype from "
                f"{', '.join(self.dtypes)}"
            )


def _linear_of(scheme: QuantScheme, dtype: str) -> Node:
    """A linear with a weight of a scheme, such as the rules of a target look at."""
    graph = Graph("linear")
    x = graph.add_input("x", TensorType(dtype, (SymDim("T"), 512)))
    return graph.append("linear", x, _matrix(graph, scheme))


def _matrix(graph: Graph, scheme: QuantScheme) -> Value:
    attrs = {"key": "w", "scheme": str(scheme), "shape": (512, 512)}
    return graph.constant("quantized", **attrs)


CPU = Target("cpu", "cpu", "cpu", ("f32", "bf16"))
TARGET_NAMES = ("auto", "cpu", "cuda", *(f"cuda:sm_{arch}" for arch in CUDA_ARCHS))


def cuda_target(arch: int) -> Target:
    """The target for a compute capability: 90 for ``cuda:sm_90``."""
    return Target(f"cuda:sm_{arch}", "cuda", "triton", ("bf16", "f16", "f32"), arch)


def resolve_target(name: str) -> Target:
    """A target from what the user wrote; ``auto`` is what this machine can run.

    ``cuda`` is this machine's GPU. Raises OctavoError for a target without kernels and for an
    unknown name.
    """
    if name == "auto":
        return _this_gpu() or CPU
    if name == "cpu":
        return CPU
    if name == "cuda":
        found = _this_gpu()
        if found is None:
            raise OctavoError(
                "--target cuda means this machine's GPU, and there is none of sm_80 or later; name "
                f"what to compile for: {', '.join(TARGET_NAMES[3:])}"
            )
        return found
    match = re.fullmatch(r"cuda:sm_(\d+)a?", name)
    if match and int(match[1]) in CUDA_ARCHS:
        return cuda_target(int(match[1]))
    if match or name.startswith("hip"):
        raise OctavoError(f"there are no kernels for {name}; choose from {', '.join(TARGET_NAMES)}")
    raise OctavoError(f"unknown target {name!r}; choose from {', '.join(TARGET_NAMES)}")


@dataclass(frozen=True)
class Targets:
    """The target that is compiled for, and all architectures that binaries are made for."""

    main: Target
    archs: tuple[int, ...]

    @property
    def every(self) -> list[Target]:
        """The oldest GPU first: what it cannot do is the reason to give."""
        return [cuda_target(arch) for arch in sorted(self.archs)] or [self.main]


def resolve_targets(names: str) -> Targets:
    """Several targets with commas: ``cuda:sm_90,sm_80`` is cuda:sm_90 with binaries for sm_80 too.

    Raises OctavoError as ``resolve_target`` does, and for a mixture of kinds.
    """
    first, *more = (name.strip() for name in names.split(","))
    main = resolve_target(first)
    others = [resolve_target(f"cuda:{name}" if name.startswith("sm_") else name) for name in more]
    if others and any(target.kind != "cuda" for target in (main, *others)):
        raise OctavoError(f"{names!r}: only cuda targets can be combined")
    archs = [target.arch for target in (main, *others) if target.arch is not None]
    return Targets(main, tuple(dict.fromkeys(archs)))


def _this_gpu() -> Target | None:
    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return cuda_target(10 * major + minor) if major >= 8 else None
