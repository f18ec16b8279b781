"""One run of the benchmark: what to measure, in an order in which the parts do not disturb."""

from __future__ import annotations

import gc
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octavo.bench.machine import describe_machine, describe_model
from octavo.bench.measure import measure_decode, measure_prefill, measure_throughput, warm_up
from octavo.bench.profile_kernels import NEW_TOKENS, profile_kernels
from octavo.bench.results import Decode, Results, with_efficiency
from octavo.bench.roofline import measure_roofline
from octavo.bench.startup import measure_startup
from octavo.bench.traffic import Traffic
from octavo.ir.errors import OctavoError
from octavo.runtime.artifact import Artifact
from octavo.runtime.device import device_for
from octavo.runtime.llm import LLM

_MOST = 512  # of many requests that run at once: what the runtime takes by default on a GPU

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to measure. Lengths are in tokens; ``prefill`` lists numbers of prompts and lengths,
    ``requests`` pairs of prompt and output length.."""

    batch_sizes: tuple[int, ...] = ()
    input_len: int = 512
    output_len: int = 256
    prefill: tuple[tuple[int, int], ...] = ()
    requests: tuple[tuple[int, int], ...] = ()
    requests_name: str = "requests"
    startup: bool = False
    compare_hf: bool = False
    profile: tuple[int, ...] = ()
    repeats: int = 3
    options: dict[str, Any] = field(default_factory=dict)  # keywords of LLM

    @property
    def context(self) -> int:
        """Tokens that a sequence attends to in the middle of its decode."""
        return self.input_len + self.output_len // 2

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        lengths = [2, *(length + 1 for _, length in self.prefill), *map(sum, self.requests)]
        if self.batch_sizes:
            lengths.append(self.input_len + self.output_len)
        if self.profile:
            lengths.append(self.context + NEW_TOKENS)
        return max(lengths)

    def llm_options(self) -> dict[str, Any]:
        """Keywords of LLM under which all parts can run."""
        prompts = (count for count, _ in self.prefill)
        most = max(1, *self.batch_sizes, *self.profile, *prompts, min(len(self.requests), _MOST))
        return {
            "max_model_len": self.longest,
            "max_num_seqs": most,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,  # a repeated prompt is to be computed again
            **self.options,
        }


class Suite:
    """Measures a plan. What fails is noted in ``results.failures``, and the rest goes on.

    ``save`` is given the results after each part. No part is begun after ``seconds``.
    """

    def __init__(
        self,
        path: Path,
        plan: Plan,
        command: Sequence[str],
        *,
        show: Progress = lambda text: None,
        save: Callable[[Results], None] = lambda results: None,
        seconds: float = math.inf,
    ) -> None:
        self.artifact = Artifact.open(path, verify=False)
        self.plan = plan
        self._show = show
        self._save = save
        self._deadline = time.monotonic() + seconds
        self.device = device_for(self.artifact.manifest.target)
        show("roofline")
        self.results = Results(
            machine=describe_machine(),
            model=describe_model(self.artifact, str(plan.options.get("load_format", "auto"))),
            command=list(command),
            roofline=measure_roofline(self.device, self.artifact.dtype),
        )
        self._release()

    def run(self) -> Results:
        """Measure everything. Raises OctavoError when nothing could be measured."""
        results, plan = self.results, self.plan
        if plan.startup:  # first: the process needs the memory that the engine takes below
            self._part("start-up", self._startup)
        if plan.batch_sizes or plan.prefill or plan.requests or plan.profile:
            is_loaded = self._part("load", self._measure_engine)
            self._release()
        if plan.profile and is_loaded:  # else the same would end it, and be said twice
            self._part("modules of a decode step", self._profile_modules)
            self._release()
        if plan.compare_hf:
            self._part("Hugging Face", self._measure_hugging_face)
        if not any(
            (results.decode, results.prefill, results.throughput, results.startup, results.profiles)
        ):
            raise OctavoError("nothing was measured: " + "; ".join(results.failures))
        return results

    def _startup(self) -> None:
        options = self.plan.llm_options()
        self.results.startup.append(measure_startup(self.artifact.root, **options))

    def _measure_engine(self) -> None:
        plan = self.plan
        llm = LLM(self.artifact.root, **plan.llm_options())
        traffic = Traffic.of(self.artifact)
        warm_up(llm, 1, plan.longest // 2, 1)
        for batch_size in plan.batch_sizes:
            name = f"decode, batch {batch_size}"
            self._part(name, partial(self._decode, llm, traffic, batch_size))
        for count, length in plan.prefill:
            name = f"prefill, {count} x {length}"
            self._part(name, partial(self._prefill, llm, traffic, count, length))
        if plan.requests:
            name = f"{len(plan.requests)} requests at once"
            self._part(name, partial(self._throughput, llm))
        for batch_size in plan.profile:
            name = f"kernels of a decode step, batch {batch_size}"
            self._part(name, partial(self._profile_kernels, llm, batch_size))

    def _decode(self, llm: LLM, traffic: Traffic, batch_size: int) -> None:
        figure = measure_decode(
            llm,
            traffic,
            self.results.roofline,
            batch_size=batch_size,
            input_len=self.plan.input_len,
            output_len=self.plan.output_len,
            repeats=self.plan.repeats,
        )
        self.results.decode[:] = with_efficiency([*self.results.decode, figure])

    def _prefill(self, llm: LLM, traffic: Traffic, num_prompts: int, input_len: int) -> None:
        figure = measure_prefill(
            llm,
            traffic,
            self.results.roofline,
            num_prompts=num_prompts,
            input_len=input_len,
            repeats=self.plan.repeats,
        )
        self.results.prefill.append(figure)

    def _throughput(self, llm: LLM) -> None:
        plan = self.plan
        figure = measure_throughput(llm, plan.requests, plan.requests_name)
        self.results.throughput.append(figure)

    def _profile_kernels(self, llm: LLM, batch_size: int) -> None:
        context = self.plan.context
        self.results.profiles.append(profile_kernels(llm, batch_size=batch_size, context=context))

    def _profile_modules(self) -> None:
        # Here and not above: this needs Triton, and an artifact for the CPU does not.
        from octavo.bench.profile_modules import profile_modules
        from octavo.runtime.tune import graph_seconds

        profiles = profile_modules(
            self.artifact,
            self.device,
            graph_seconds,
            batch_sizes=self.plan.profile,
            context=self.plan.context,
            bandwidth=self.results.roofline.bandwidth,
        )
        self.results.profiles.extend(profiles)

    def _measure_hugging_face(self) -> None:
        # Here and not above: a run without the comparison needs no transformers.
        from octavo.bench import hf_baseline

        model = hf_baseline.of_artifact(self.artifact, self.device)
        figures: list[Decode] = []

        def measure(batch_size: int) -> None:
            figure = hf_baseline.measure_decode(
                model,
                batch_size=batch_size,
                input_len=self.plan.input_len,
                output_len=self.plan.output_len,
                repeats=self.plan.repeats,
            )
            figures.append(figure)

        for batch_size in self.plan.batch_sizes:
            self._part(f"Hugging Face, batch {batch_size}", partial(measure, batch_size))
        self.results.decode.extend(with_efficiency(figures))

    def _part(self, name: str, measure: Callable[[], None]) -> bool:
        """Whether a part was measured; an error in it is noted, and ends it alone."""
        self._show(name)
        is_measured = False
        try:
            if time.monotonic() > self._deadline:
                raise OctavoError("not begun, the time was up")
            measure()
            is_measured = True
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            self.results.failures.append(f"{name}: {type(error).__name__}: {reason}")
        self._save(self.results)
        return is_measured

    def _release(self) -> None:
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


@contextmanager
def artifact_of(model: str | Path, *, dtype: str = "auto", dummy: bool = False) -> Iterator[Path]:
    """The artifact itself, or one compiled for this machine from a model or a config.json.

    A config alone is given random weights, or none at all if ``dummy``; that artifact is removed
    afterwards. One of a whole model is kept in the cache.
    """
    path = Path(model).expanduser()
    if (path / "manifest.json").is_file():
        yield path
        return
    if path.suffix == ".json" or dummy:
        from octavo.compile import compile_model

        with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
            compile_model(
                path,
                Path(folder) / path.stem,
                dtype=dtype,
                random_weights=0,
                with_weights=not dummy,
            )
            yield Path(folder) / path.stem
        return
    from octavo.artifact_cache import compiled

    yield compiled(model, dtype=dtype)
