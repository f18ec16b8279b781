"""The calls that a step makes of its kernel modules, with the very tensors of the step.

The tuner and the profiler run a program's own step and look at the calls in it. So they need no
table of what each op takes, and the layers of the model are the copies of the weights over which
they rotate, as the step itself does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from octavo.ir.manifest import num_groups
from octavo.runtime.artifact import Artifact, Step
from octavo.runtime.device_weights import load_weights, stored_weights
from octavo.runtime.kernel import Bucket, Choices
from octavo.runtime.kv_cache import KVCaches, allocate_kv_caches, block_bytes, plan_kv_cache
from octavo.runtime.program_loader import import_program

_CACHE_SHARE = 0.7  # of the memory that is free beside the weights


@dataclass(frozen=True)
class ModuleCall:
    """A call of a module's ``run``. ``rows`` and ``bucket`` are None where it has no choices."""

    module: ModuleType
    run: Callable[..., Any]
    args: tuple[Any, ...]
    keywords: dict[str, Any]
    rows: int | None = None
    bucket: Bucket | None = None

    @property
    def name(self) -> str:
        """The module's name, as in ``kernels/src``."""
        return self.module.__name__.rpartition(".")[2]

    def __call__(self) -> Any:
        """Run it again."""
        return self.run(*self.args, **self.keywords)

    def tensors(self) -> Iterator[Tensor]:
        """The operands, results and scratch buffers; the shared workspace is no tensor."""
        values = (*self.args, *self.keywords.values())
        return (value for value in values if isinstance(value, Tensor))


# Takes a call before it is run, and gives what the program gets for it.
Handler = Callable[[ModuleCall], Any]


@contextmanager
def intercepted(modules: Iterable[ModuleType], handler: Handler) -> Iterator[None]:
    """Give every call of the modules' ``run`` to a handler, inside the ``with``."""
    with ExitStack() as undo:
        for module in modules:
            if hasattr(module, "run"):
                undo.callback(setattr, module, "run", module.run)
                module.run = _intercepting(module, handler)  # type: ignore[attr-defined]
        yield


def _intercepting(module: ModuleType, handler: Handler) -> Callable[..., Any]:
    run = module.run

    def intercept(*args: Any, **keywords: Any) -> Any:
        return handler(ModuleCall(module, run, args, keywords))

    return intercept


def with_rows(call: ModuleCall) -> tuple[ModuleCall, Any]:
    """Run a call and see for how many rows it asks for a choice: the call with them, its result."""
    choices = getattr(call.module, "CHOICES", None)
    if not isinstance(choices, Choices):
        return call, call()
    asked: list[int] = []
    for_rows = choices.for_rows

    def noting(rows: int) -> dict[str, Any]:
        asked.append(rows)
        return for_rows(rows)

    vars(choices)["for_rows"] = noting
    try:
        result = call()
    finally:
        del vars(choices)["for_rows"]
    if not asked:
        return call, result
    rows, bucket = asked[-1], choices.bucket(asked[-1])
    return ModuleCall(call.module, call.run, call.args, call.keywords, rows, bucket), result


@dataclass(frozen=True)
class StepSize:
    """A step to look at: decode if each of its sequences has one token, else prefill.

    Sequences have ``context`` tokens each, or as many on average: unless ``is_even`` from a quarter
    of it to seven quarters, as requests that come and go have.
    """

    num_tokens: int
    num_seqs: int
    context: int
    is_even: bool = True

    def contexts(self) -> Tensor:
        """``i64[num_seqs]``, in no order."""
        if self.is_even or self.num_seqs == 1:
            return torch.full((self.num_seqs,), self.context)
        least = self.context // 4
        ordered = torch.linspace(least, 2 * self.context - least, self.num_seqs).long()
        return ordered[torch.randperm(self.num_seqs, generator=torch.Generator().manual_seed(0))]


class StepProgram:
    """A program with random weights and a KV cache of its own, whose steps can be run at will."""

    def __init__(
        self,
        artifact: Artifact,
        device: torch.device,
        sizes: Iterable[StepSize],
        *,
        block_size: int = 16,
    ) -> None:
        self.device = device
        self.block_size = block_size
        sizes = list(sizes)
        with torch.inference_mode():
            weights = load_weights(stored_weights(artifact), device, dummy=True)
            self.caches = self._allocate_caches(artifact, sizes)
            self.num_blocks = self.caches[0][0].shape[0] if self.caches else 2
            program = import_program(artifact.root, artifact.manifest).Program
            self._step: Step = program(
                weights,
                self.caches,
                max_num_tokens=max(size.num_tokens for size in sizes),
                max_num_seqs=max(size.num_seqs for size in sizes),
            )

    def _allocate_caches(self, artifact: Artifact, sizes: list[StepSize]) -> KVCaches:
        slots = artifact.manifest.kv_slots
        longest = {size: int(size.contexts().max()) for size in sizes}
        self.num_groups = num_groups(slots)
        wanted = max(s.num_seqs * (longest[s] + self.block_size) for s in sizes)
        wanted *= self.num_groups
        available = wanted * block_bytes(slots, artifact.kv_format, self.block_size)
        if self.device.type == "cuda":
            available = int(torch.cuda.mem_get_info(self.device)[0] * _CACHE_SHARE)
        plan = plan_kv_cache(
            slots,
            artifact.kv_format,
            block_size=self.block_size,
            wanted_tokens=wanted,
            available_bytes=available,
        )
        return allocate_kv_caches(slots, plan, artifact.kv_format, self.device)

    def run(self, size: StepSize) -> Tensor:
        """Run a step of this size; the logits."""
        with torch.inference_mode():
            return self.ready(size)()

    def ready(self, size: StepSize) -> Callable[[], Tensor]:
        """A step of this size whose inputs are there, so that a graph can be made of it."""
        inputs = self._inputs(size)
        return lambda: self._step(*inputs)

    def calls(self, size: StepSize, modules: Iterable[ModuleType]) -> list[ModuleCall]:
        """The calls of these modules in a step of this size, in their order."""
        found: list[ModuleCall] = []

        def note(call: ModuleCall) -> Any:
            seen, result = with_rows(call)
            found.append(seen)
            return result

        with intercepted(modules, note):
            self.run(size)
        return found

    def cache_of(self, tensor: Tensor) -> Tensor | None:
        """The part of the KV cache that a tensor is, in whatever view; None for any other."""
        caches = (cache for slot in self.caches for cache in slot)
        return next((cache for cache in caches if cache.data_ptr() == tensor.data_ptr()), None)

    def _inputs(self, size: StepSize) -> tuple[Tensor, ...]:
        """A step's inputs (docs/architecture.md).

        Where the cache is too small for all of them, sequences share blocks.
        """
        each, more = divmod(size.num_tokens, size.num_seqs)
        counts = torch.tensor([each + (s < more) for s in range(size.num_seqs)])
        query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
        lens = torch.maximum(counts, size.contexts())
        width = -(-int(lens.max()) // self.block_size)
        groups = () if self.num_groups == 1 else (self.num_groups,)
        blocks = torch.arange(self.num_groups * size.num_seqs * width)
        table = 1 + blocks.view(*groups, size.num_seqs, width) % (self.num_blocks - 1)
        owner = torch.repeat_interleave(torch.arange(size.num_seqs), counts)
        place = torch.arange(size.num_tokens) - query_start[owner]
        positions = (lens - counts)[owner] + place
        block_ids = table[..., owner, positions // self.block_size]
        inputs = (
            torch.zeros(size.num_tokens, dtype=torch.int64),
            positions,
            block_ids * self.block_size + positions % self.block_size,
            table.to(torch.int32),
            query_start.to(torch.int32),
            lens.to(torch.int32),
            query_start[1:] - 1,
        )
        return tuple(tensor.to(self.device) for tensor in inputs)
