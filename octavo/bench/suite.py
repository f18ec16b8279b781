"""One run of the benchmark: what to measure, in an order in which the parts do not disturb."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from octavo.bench.machine import describe_machine, describe_model
from octavo.bench.measure import measure_decode, measure_prefill, measure_throughput, warm_up
from octavo.bench.results import Results, with_efficiency
from octavo.bench.roofline import measure_roofline
from octavo.bench.startup import measure_startup
from octavo.bench.traffic import Traffic
from octavo.ir.errors import OctavoError
from octavo.runtime.artifact import Artifact
from octavo.runtime.device import device_for
from octavo.runtime.llm import LLM

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
    repeats: int = 3
    options: dict[str, Any] = field(default_factory=dict)  # keywords of LLM

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        decode = [self.input_len + self.output_len] if self.batch_sizes else []
        return max(
            [*decode, *(length + 1 for _, length in self.prefill), *map(sum, self.requests), 2]
        )

    @property
    def most(self) -> int | None:
        """Most sequences that have to run at once; None where the engine may choose."""
        return max(self.batch_sizes, default=0) if not self.requests else None

    def llm_options(self) -> dict[str, Any]:
        """Keywords of LLM under which all parts can run."""
        sizes: dict[str, Any] = {"max_model_len": self.longest, "skip_tokenizer_init": True}
        if self.most is not None:
            sizes["max_num_seqs"] = max([self.most, *(count for count, _ in self.prefill), 1])
        return {**sizes, **self.options}


class Suite:
    """Measures a plan. What fails is noted in ``results.failures``, and the rest goes on."""

    def __init__(
        self, path: Path, plan: Plan, command: Sequence[str], show: Progress = lambda text: None
    ) -> None:
        self.artifact = Artifact.open(path, verify=False)
        self.plan = plan
        self._show = show
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
            with self._part("start-up"):
                options = plan.llm_options()
                results.startup.append(measure_startup(self.artifact.root, **options))
        if plan.batch_sizes or plan.prefill or plan.requests:
            with self._part("load"):
                self._measure_engine(LLM(self.artifact.root, **plan.llm_options()))
            self._release()
        results.decode[:] = with_efficiency(results.decode)
        if plan.compare_hf:
            with self._part("Hugging Face"):
                self._measure_hugging_face()
        found = (results.decode, results.prefill, results.throughput, results.startup)
        if not any(found):
            raise OctavoError("nothing was measured: " + "; ".join(results.failures))
        return results

    def _measure_engine(self, llm: LLM) -> None:
        plan, results = self.plan, self.results
        traffic, roofline = Traffic.of(self.artifact), results.roofline
        with self._part("warm-up"):
            warm_up(llm, 1, plan.longest // 2, 1)
        for batch_size in plan.batch_sizes:
            with self._part(f"decode, batch {batch_size}"):
                figure = measure_decode(
                    llm,
                    traffic,
                    roofline,
                    batch_size=batch_size,
                    input_len=plan.input_len,
                    output_len=plan.output_len,
                    repeats=plan.repeats,
                )
                results.decode.append(figure)
        for count, length in plan.prefill:
            with self._part(f"prefill, {count} x {length}"):
                results.prefill.append(
                    measure_prefill(
                        llm,
                        traffic,
                        roofline,
                        num_prompts=count,
                        input_len=length,
                        repeats=plan.repeats,
                    )
                )
        if plan.requests:
            with self._part(f"{len(plan.requests)} requests at once"):
                results.throughput.append(
                    measure_throughput(llm, plan.requests, plan.requests_name)
                )

    def _measure_hugging_face(self) -> None:
        # Here and not above: a run without the comparison needs no transformers.
        from octavo.bench import hf_baseline

        model = hf_baseline.of_artifact(self.artifact, self.device)
        figures = []
        for batch_size in self.plan.batch_sizes:
            with self._part(f"Hugging Face, batch {batch_size}"):
                figures.append(
                    hf_baseline.measure_decode(
                        model,
                        batch_size=batch_size,
                        input_len=self.plan.input_len,
                        output_len=self.plan.output_len,
                        repeats=self.plan.repeats,
                    )
                )
        self.results.decode.extend(with_efficiency(figures))

    @contextmanager
    def _part(self, name: str) -> Iterator[None]:
        """Show a part's name; an error in it is noted, and ends it alone."""
        self._show(name)
        try:
            yield
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            self.results.failures.append(f"{name}: {type(error).__name__}: {reason}")

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
