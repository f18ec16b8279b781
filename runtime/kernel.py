"""What a rendered kernel module is written against: kernels, launches, choices, scratch memory.

See docs/cuda.md. Artifacts import this module by its name, so its names are part of the format.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.runtime.errors import ArtifactError
from octavo.runtime.kernel_signature import Parameter, parse_signature

NEEDS_TRITON = (
    "this artifact's kernels need Triton 3.6 or newer; install it with `pip install 'triton>=3.6'`"
)

try:
    import triton
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
except ImportError as error:
    raise ArtifactError(f"{NEEDS_TRITON} ({error})") from None

DEFAULT_OPTIONS = {"num_warps": 4, "num_stages": 3}
# Options of the Triton compiler that a launch may give; all other keywords are constexprs.
OPTIONS = (*DEFAULT_OPTIONS, "maxnreg")
PDL_ARCH = 90  # programmatic dependent launch begins with sm_90
# Shared memory that a program may ask for, in KiB, by architecture (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability").
SHARED_KIB = {80: 163, 86: 99, 87: 163, 89: 99, 90: 227, 100: 227, 103: 227, 120: 99}
_LEAST_SHARED_KIB = min(SHARED_KIB.values())
NEEDS_KIB = "needs_kib"
NEEDS_ARCH = "needs_arch"
_NEEDS = (NEEDS_KIB, NEEDS_ARCH)
ALIGNMENT = 16

Constant = Any  # an int, a float, a bool, a str, None or a Triton dtype
# Loads a kernel for a device: given the kernel, the device's index and the launch.
Loader = Callable[["Kernel", int, "Launch"], Callable[[tuple[int, ...], list[Any]], None]]


@triton.jit
def pdl_trigger():  # type: ignore[no-untyped-def]
    """Let the next kernel start while this one runs. Call it under ``if PDL:`` only."""
    gdc_launch_dependents()


@triton.jit
def pdl_wait():  # type: ignore[no-untyped-def]
    """Wait until all that earlier kernels wrote can be read. Call it under ``if PDL:`` only."""
    gdc_wait()


@dataclass(frozen=True)
class Cost:
    """What one call moves and computes: bytes of global memory, and floating-point operations."""

    bytes: int
    flops: int


@dataclass(frozen=True)
class Workspace:
    """Scratch memory that all kernels of a program share.

    ``scratch: f32[2**24]`` holds anything while a kernel runs; ``counters: i32[2**16]`` are zero
    between kernels.
    """

    scratch: Tensor
    counters: Tensor

    @classmethod
    def allocate(cls, device: torch.device | str) -> Workspace:
        """Fresh memory on a device: the counters are zero."""
        return cls(
            torch.empty(2**24, dtype=torch.float32, device=device),
            torch.zeros(2**16, dtype=torch.int32, device=device),
        )

    @staticmethod
    def num_bytes() -> int:
        """Bytes of one workspace."""
        return 4 * 2**24 + 4 * 2**16


class Bucket:
    """Ways to run an op for up to ``max_rows`` rows (None: any number), and the chosen one.

    Candidates are in the order of preference; ``chosen`` is at first the default of any GPU.
    """

    def __init__(self, max_rows: int | None, candidates: Sequence[Mapping[str, Any]]) -> None:
        """Raises ValueError if no candidate fits every GPU."""
        self.max_rows = max_rows
        self._candidates = tuple(dict(candidate) for candidate in candidates)
        self.reset(None)

    @property
    def candidates(self) -> list[dict[str, Any]]:
        """Those for the architecture at hand, each once; a choice is made among them."""
        found: list[dict[str, Any]] = []
        for candidate in self._candidates:
            choice = {name: value for name, value in candidate.items() if name not in _NEEDS}
            if candidate.get(NEEDS_ARCH) in (None, self._arch) and choice not in found:
                found.append(choice)
        return found

    def reset(self, arch: int | None) -> None:
        """Choose the default of an architecture, 90 for sm_90; None is any of them."""
        self._arch = arch
        self.chosen = self.default(arch)

    def default(self, arch: int | None) -> dict[str, Any]:
        """The first candidate that is for an architecture and fits its shared memory."""
        room = SHARED_KIB.get(arch or 0, _LEAST_SHARED_KIB)
        for candidate in self._candidates:
            if candidate.get(NEEDS_KIB, 0) <= room and candidate.get(NEEDS_ARCH) in (None, arch):
                return {name: value for name, value in candidate.items() if name not in _NEEDS}
        raise ValueError(f"{self.name} rows: no candidate fits every GPU")

    @property
    def name(self) -> str:
        """How a plan names this bucket: ``64``, or ``*`` for the last one."""
        return "*" if self.max_rows is None else str(self.max_rows)


class Choices:
    """How an op is run, by its number of rows.

    Given ``(max_rows, candidates)`` in ascending order, the last with None for ``max_rows``.
    Candidates are in the order of preference: the first that fits the GPU is taken until a plan
    chooses another. Two entries of a candidate are not part of the choice: ``needs_kib`` is the
    shared memory that it takes, for those that do not fit every GPU, and ``needs_arch`` the one
    architecture whose instructions it is written in.
    """

    def __init__(self, *buckets: tuple[int | None, Sequence[Mapping[str, Any]]]) -> None:
        self.buckets = tuple(Bucket(max_rows, candidates) for max_rows, candidates in buckets)
        self._bounds = [b.max_rows for b in self.buckets[:-1] if b.max_rows is not None]
        is_sound = self._bounds == sorted(set(self._bounds))
        if len(self._bounds) != len(buckets) - 1 or not is_sound or buckets[-1][0] is not None:
            raise ValueError("the buckets' max_rows must ascend, with None for the last one only")

    def bucket(self, rows: int) -> Bucket:
        """The bucket that a number of rows falls into."""
        return self.buckets[bisect_left(self._bounds, rows)]

    def for_rows(self, rows: int) -> dict[str, Any]:
        """The chosen way to run this many rows."""
        return self.buckets[bisect_left(self._bounds, rows)].chosen

    def choose(self, bucket_name: str, choice: Mapping[str, Any]) -> None:
        """Use one of a bucket's candidates from now on. Raises ValueError if it is none of them."""
        for bucket in self.buckets:
            if bucket.name == bucket_name:
                if dict(choice) not in bucket.candidates:
                    raise ValueError(f"{dict(choice)} is no candidate for {bucket_name} rows")
                bucket.chosen = dict(choice)
                return
        names = ", ".join(bucket.name for bucket in self.buckets)
        raise ValueError(f"there is no row bucket {bucket_name!r}; there are {names}")

    def reset(self, arch: int | None = None) -> None:
        """Go back to the default of an architecture everywhere; None is what fits any."""
        for bucket in self.buckets:
            bucket.reset(arch)


@dataclass(frozen=True)
class Launch:
    """One launch, as it was asked for: everything that its binary depends on but the architecture.

    ``constants`` are the constexprs without ``PDL``: that is ``pdl``, if the architecture has it.
    """

    kernel: Kernel
    constants: dict[str, Constant]
    options: dict[str, int]
    grid: tuple[int, ...]
    pdl: bool

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for launches that need the same binaries."""
        constants = tuple((type(value), value) for value in self.constants.values())
        return (id(self.kernel), constants, tuple(self.options.items()), self.pdl)

    def constants_for(self, arch: int) -> dict[str, Constant]:
        """All constexprs on an architecture, 90 for sm_90."""
        if not self.kernel.has_pdl:
            return self.constants
        return {**self.constants, "PDL": self.pdl and arch >= PDL_ARCH}


_RECORD: ContextVar[list[Launch] | None] = ContextVar("_RECORD", default=None)


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect the launches on meta tensors that are made inside the ``with``."""
    launches: list[Launch] = []
    token = _RECORD.set(launches)
    try:
        yield launches
    finally:
        _RECORD.reset(token)


class Kernel:
    """A ``@triton.jit`` function with the types of its parameters: ``launch`` runs it. One of
    ``@gluon.jit`` will do as well, but no interpreter runs it.

    ``signature`` types the parameters that are not ``tl.constexpr``, in order, as
    ``x_ptr: *bf16, num_rows: i32``; see docs/cuda.md. A tensor that begins elsewhere than at a
    multiple of 16 bytes gets a binary of its own, which counts on less, unless ``is_strict``: TMA
    takes no others. Raises ValueError for a signature that does not fit the function.
    """

    def __init__(self, fn: Any, signature: str, *, is_strict: bool = False) -> None:
        self.fn = fn
        self.name: str = fn.__name__
        self.signature = signature
        self.module: str = fn.fn.__module__
        self.parameters: tuple[Parameter, ...] = parse_signature(signature)
        self.constexprs = tuple(name for name in fn.arg_names if _is_constexpr(fn.fn, name))
        self.has_pdl = "PDL" in self.constexprs
        self.is_interpreted = not isinstance(fn, triton.JITFunction)
        self.is_strict = is_strict
        self.loader: Loader | None = None
        typed = [name for name in fn.arg_names if name not in self.constexprs]
        given = [parameter.name for parameter in self.parameters]
        if typed != given:
            raise ValueError(f"{self.name}: its parameters are {typed}, the signature has {given}")
        self._pointers = [i for i, p in enumerate(self.parameters) if p.is_pointer]
        self._aligned = [i for i, p in enumerate(self.parameters) if p.alignment >= ALIGNMENT]
        if not self._pointers:
            raise ValueError(f"{self.name}: a kernel needs a pointer: it says where it runs")
        self._first = self._pointers[0]
        self._loaded: dict[tuple[Any, ...], Any] = {}
        self._unaligned: Kernel | None = None

    def launch(
        self, grid: tuple[int, ...], *args: Any, pdl: bool = True, **constants: Constant
    ) -> None:
        """Run the kernel on the current stream; ``grid`` counts programs in up to 3 dims.

        ``args`` are the typed parameters in order, ``constants`` every constexpr but ``PDL``, and
        the options ``num_warps``, ``num_stages`` and ``maxnreg``. On CPU tensors this needs
        Triton's interpreter, on meta tensors nothing runs. Raises ValueError for arguments that do
        not fit.
        """
        device_index = args[self._first].get_device()
        if device_index < 0 or self.is_interpreted:
            self._launch_elsewhere(grid, args, pdl, constants)
            return
        # Equal constants of other types, 1 and True, share an entry: a call site has one type.
        key = (device_index, pdl, *constants, *constants.values())
        run = self._loaded.get(key)
        if run is None:
            run = self._load(device_index, Launch(*self._checked(grid, args, constants), pdl))
            self._loaded[key] = run
        values = list(args)
        for index in self._pointers:
            values[index] = values[index].data_ptr()
        bits = 0
        for index in self._aligned:
            bits |= values[index]
        if bits % ALIGNMENT:
            self._for_unaligned(values).launch(grid, *args, pdl=pdl, **constants)
            return
        run(grid, values)

    def forget(self) -> None:
        """Drop all loaded binaries: the next launch asks the loader again."""
        self._loaded.clear()
        self._unaligned = None

    def source(self) -> str:
        """The text of the module that the kernel is in."""
        module = sys.modules[self.module]
        loader = getattr(module, "__loader__", None)
        text: str | None = loader.get_source(self.module) if loader is not None else None
        assert text is not None, f"{self.module} has no source"
        return text

    def _load(self, device_index: int, launch: Launch) -> Any:
        if self.loader is None:
            from octavo.runtime.binaries import load_unbound  # imports this module

            return load_unbound(self, device_index, launch)
        return self.loader(self, device_index, launch)

    def _launch_elsewhere(
        self, grid: tuple[int, ...], args: tuple[Any, ...], pdl: bool, constants: dict[str, Any]
    ) -> None:
        """Record on the meta device, interpret on the CPU."""
        if args[self._first].is_meta:
            offsets = [
                a.storage_offset() * a.itemsize if isinstance(a, Tensor) else 0 for a in args
            ]
            if any(offsets[index] % ALIGNMENT for index in self._aligned):
                self._for_unaligned(offsets).launch(grid, *args, pdl=pdl, **constants)
                return
        launch = Launch(*self._checked(grid, args, constants), pdl)
        if args[self._first].is_meta:
            record = _RECORD.get()
            if record is not None:
                record.append(launch)
            return
        if not self.is_interpreted:
            raise ValueError(
                f"{self.name}: tensors are on the CPU; use a GPU, or set TRITON_INTERPRET=1 before "
                "triton is imported"
            )
        if not math.prod(grid):
            return
        named = {p.name: value for p, value in zip(self.parameters, args, strict=True)}
        self.fn[grid](**named, **launch.constants_for(0))

    def _checked(
        self, grid: tuple[int, ...], args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[Kernel, dict[str, Constant], dict[str, int], tuple[int, ...]]:
        """Kernel, constants, options and grid of a launch whose arguments fit the signature."""
        options = DEFAULT_OPTIONS | {k: v for k, v in keywords.items() if k in OPTIONS}
        constants = {k: v for k, v in keywords.items() if k not in OPTIONS}
        wanted = set(self.constexprs) - {"PDL"}
        if set(constants) != wanted:
            raise ValueError(
                f"{self.name}: constexprs are {sorted(wanted)}, given are {sorted(constants)}"
            )
        if len(args) != len(self.parameters):
            raise ValueError(f"{self.name}: {len(args)} arguments, not {len(self.parameters)}")
        for parameter, value in zip(self.parameters, args, strict=True):
            parameter.check(self.name, value)
        if not 1 <= len(grid) <= 3:
            raise ValueError(f"{self.name}: a grid has 1 to 3 dims, not {len(grid)}")
        ordered = {name: constants[name] for name in self.constexprs if name != "PDL"}
        return self, ordered, options, grid

    def _for_unaligned(self, addresses: list[Any]) -> Kernel:
        """This kernel for tensors that are aligned to their elements only."""
        if self.is_strict:
            index = next(i for i in self._aligned if addresses[i] % ALIGNMENT)
            raise ValueError(
                f"{self.name}: {self.parameters[index].name} = {addresses[index]:#x} is not a "
                f"multiple of {ALIGNMENT}, as the signature says"
            )
        if self._unaligned is None:
            self._unaligned = Kernel(self.fn, ", ".join(p.unaligned for p in self.parameters))
        self._unaligned.loader = self.loader
        return self._unaligned


def _is_constexpr(function: Any, name: str) -> bool:
    annotation = function.__annotations__.get(name)
    return str(getattr(annotation, "__name__", annotation)).endswith("constexpr")
