"""What a benchmark found, as JSON with a schema that later versions can still read."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from octavo.bench.roofline import Roofline
from octavo.ir.errors import OctavoError
from octavo.runtime.whole_file import write_whole

SCHEMA = 1


@dataclass(frozen=True)
class Machine:
    """Where it ran: names of processor and GPU (None without one), versions by package.

    ``python_rate`` is how many turns of an empty Python loop a second one core makes: what the
    host's part of a step takes differs by as much between machines with one processor's name.
    """

    date: str
    system: str
    cpu: str
    num_cpus: int
    gpu: str | None
    versions: dict[str, str]
    python_rate: float | None = None


@dataclass(frozen=True)
class Model:
    """What ran: the artifact's own description."""

    name: str
    architecture: str
    target: str
    dtype: str
    quantization: str | None
    artifact_id: str
    weight_bytes: int
    load_format: str


@dataclass(frozen=True)
class Decode:
    """Decode at one batch size: medians over repeats, prefill left out.

    ``floor_ms`` is the least time of a step by the roofline, ``share`` that over ``step_ms``,
    ``efficiency`` the tokens a second over those of the smallest batch size scaled up.
    """

    engine: str
    batch_size: int
    input_len: int
    output_len: int
    tokens_per_second: float
    slowest: float
    fastest: float
    step_ms: float
    first_token_ms: float | None
    floor_ms: float | None
    share: float | None
    efficiency: float | None = None

    @classmethod
    def of_steps(
        cls,
        engine: str,
        sizes: tuple[int, int, int],
        step_seconds: Sequence[float],
        first_token_seconds: float,
        floor_seconds: float | None = None,
    ) -> Decode:
        """From the mean step of each repeat; ``sizes`` are batch size, input and output length."""
        batch_size, input_len, output_len = sizes
        median = statistics.median(step_seconds)
        return cls(
            engine=engine,
            batch_size=batch_size,
            input_len=input_len,
            output_len=output_len,
            tokens_per_second=batch_size / median,
            slowest=batch_size / max(step_seconds),
            fastest=batch_size / min(step_seconds),
            step_ms=median * 1e3,
            first_token_ms=first_token_seconds * 1e3,
            floor_ms=None if floor_seconds is None else floor_seconds * 1e3,
            share=None if floor_seconds is None else floor_seconds / median,
        )


@dataclass(frozen=True)
class Prefill:
    """Prompts alone: prompt tokens a second until the last one's first new token."""

    num_prompts: int
    input_len: int
    tokens_per_second: float
    seconds: float
    floor_seconds: float
    share: float


@dataclass(frozen=True)
class StepGroup:
    """Steps of one kind, and the seconds that they took together."""

    kind: str
    num_steps: int
    seconds: float


@dataclass(frozen=True)
class Throughput:
    """Many requests of different lengths, all submitted at once; ``steps`` is of the last run."""

    source: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    requests_per_second: float
    steps: list[StepGroup] = field(default_factory=list)


@dataclass(frozen=True)
class Startup:
    """From the start of a process to its first token: seconds by phase, which add up."""

    phases: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True)
class KernelTime:
    """One kind of kernel in a decode step: all its calls of the step together.

    ``num_bytes`` and ``share`` of the bandwidth are None where the bytes are not known.
    """

    name: str
    num_calls: int
    microseconds: float
    num_bytes: int | None = None
    share: float | None = None


@dataclass(frozen=True)
class Profile:
    """The kernels of a decode step at one batch size, the longest first."""

    batch_size: int
    context: int
    method: str
    kernels: list[KernelTime]


@dataclass(frozen=True)
class Results:
    """All that one run found, and the command that found it. ``failures`` says what it did not."""

    machine: Machine
    model: Model
    command: list[str]
    roofline: Roofline
    decode: list[Decode] = field(default_factory=list)
    prefill: list[Prefill] = field(default_factory=list)
    throughput: list[Throughput] = field(default_factory=list)
    startup: list[Startup] = field(default_factory=list)
    profiles: list[Profile] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        """The text of a results file."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, name: str = "<text>") -> Results:
        """Read a results file. Raises OctavoError for anything else."""
        try:
            body = json.loads(text)
            if body.pop("schema") != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            return cls(**{key: _read(key, value) for key, value in body.items()})
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise OctavoError(
                f"{name} holds no results that this version reads ({error}); write them again with "
                "`octavo bench --output`"
            ) from None


_ITEMS: dict[str, type[Any]] = {
    "decode": Decode,
    "prefill": Prefill,
    "startup": Startup,
}
_PARTS: dict[str, type[Any]] = {"machine": Machine, "model": Model, "roofline": Roofline}


def _read(key: str, value: Any) -> Any:
    if key in _PARTS:
        return _PARTS[key](**value)
    if key == "throughput":
        return [
            Throughput(**{**item, "steps": [StepGroup(**each) for each in item.get("steps", [])]})
            for item in value
        ]
    if key in _ITEMS:
        return [_ITEMS[key](**item) for item in value]
    if key == "profiles":
        return [
            Profile(**{**item, "kernels": [KernelTime(**each) for each in item["kernels"]]})
            for item in value
        ]
    return value


def with_efficiency(figures: Sequence[Decode]) -> list[Decode]:
    """The figures of one engine with their scaling efficiency from the smallest batch upward."""
    if not figures:
        return []
    base = min(figures, key=lambda figure: figure.batch_size)
    each = base.tokens_per_second / base.batch_size
    return [
        dataclasses.replace(f, efficiency=f.tokens_per_second / (each * f.batch_size))
        for f in figures
    ]


def write_results(results: Results, path: Path) -> None:
    """Write the file, and its folder if there is none. It is there whole or as it was before: a
    run that saves after each part may end in the middle of it."""
    write_whole(path, results.to_json().encode())
