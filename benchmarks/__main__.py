"""`make bench`: Octavo against Hugging Face `generate` on the cpu target.

    python -m benchmarks [--model GGUF_OR_DIRECTORY] [--dtype float32] [--repeats 3] [--output DIR]

The engines take turns, so that a noisy neighbour hits all of them; figures are medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

import octavo
from benchmarks import report
from octavo.bench import hf_baseline, workload
from octavo.bench.roofline import matmul_rate, read_bandwidth
from octavo.bench.timeline import run
from octavo.compile import compile_model
from octavo.runtime.llm import LLM

TARGETS = {
    ("single", "hugging face"): 1.1,
    ("mixed", "hugging face, one by one"): 3.0,
    ("mixed", "hugging face, padded batch"): 1.3,
}


def main() -> None:
    """Measure, print, write."""
    options = _options()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        artifact = Path(folder) / "artifact"
        compile_model(options.model, artifact, dtype=options.dtype, target="cpu")
        results = _measure(options, artifact)
    options.output.mkdir(parents=True, exist_ok=True)
    report.print_tables(results)
    report.write_json(results, options.output / "cpu.json")
    report.draw(results, options.output / "cpu.png")
    print(f"written to {options.output}/cpu.json and cpu.png")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--model", type=Path, default=Path(".cache/demo.gguf"))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path(".cache/bench"))
    return parser.parse_args()


def _measure(options: argparse.Namespace, artifact: Path) -> report.Results:
    llm = LLM(str(artifact), max_num_seqs=16, enable_prefix_caching=False)
    model = hf_baseline.load(options.model, getattr(torch, options.dtype))
    single = workload.single(llm.vocab_size)
    mixed = workload.mixed(llm.vocab_size)
    runs: dict[tuple[str, str], Callable[[], object]] = {
        ("single", "octavo"): lambda: run(llm.engine, single),
        ("single", "hugging face"): lambda: hf_baseline.one_by_one(model, single),
        ("mixed", "octavo"): lambda: run(llm.engine, mixed),
        ("mixed", "hugging face, one by one"): lambda: hf_baseline.one_by_one(model, mixed),
        ("mixed", "hugging face, padded batch"): lambda: hf_baseline.padded_batch(model, mixed),
    }
    jobs = {"single": single, "mixed": mixed}
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    run(llm.engine, single)  # warm-up of both engines
    hf_baseline.one_by_one(model, single)
    for _ in range(options.repeats):
        for key, once in runs.items():
            tokens = sum(job.new_tokens for job in jobs[key[0]])
            start = time.perf_counter()
            once()
            rates[key].append(tokens / (time.perf_counter() - start))
    return _results(options, artifact, rates)


def _results(
    options: argparse.Namespace, artifact: Path, rates: dict[tuple[str, str], list[float]]
) -> report.Results:
    figures = [
        report.Figure(load, engine, statistics.median(seen), min(seen), max(seen))
        for (load, engine), seen in rates.items()
    ]
    medians = {(f.workload, f.engine): f.tokens_per_second for f in figures}
    return report.Results(
        model=options.model.name,
        dtype=options.dtype,
        threads=options.threads,
        versions={m.__name__: m.__version__ for m in (octavo, torch, transformers)},
        read_bandwidth=read_bandwidth(),
        matmul_rate=matmul_rate(),
        weight_bytes=sum(p.stat().st_size for p in (artifact / "weights").glob("*.safetensors")),
        figures=figures,
        ratios=[
            report.Ratio(load, against, medians[load, "octavo"] / medians[load, against], target)
            for (load, against), target in TARGETS.items()
        ],
    )


if __name__ == "__main__":
    main()
