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
from benchmarks import hugging_face, machine, report, workload
from benchmarks.workload import Job
from octavo.compile import compile_model
from octavo.runtime.llm import LLM
from octavo.runtime.sampling_params import SamplingParams

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
    llm = LLM(str(artifact), max_num_seqs=16)
    model = hugging_face.load(options.model, getattr(torch, options.dtype))
    single = workload.single(llm.vocab_size)
    mixed = workload.mixed(llm.vocab_size)
    runs: dict[tuple[str, str], Callable[[], None]] = {
        ("single", "octavo"): lambda: _octavo(llm, single),
        ("single", "hugging face"): lambda: hugging_face.one_by_one(model, single),
        ("mixed", "octavo"): lambda: _octavo(llm, mixed),
        ("mixed", "hugging face, one by one"): lambda: hugging_face.one_by_one(model, mixed),
        ("mixed", "hugging face, padded batch"): lambda: hugging_face.padded_batch(model, mixed),
    }
    jobs = {"single": single, "mixed": mixed}
    rates: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    _octavo(llm, single)  # warm-up of both engines
    hugging_face.one_by_one(model, single)
    for _ in range(options.repeats):
        for key, run in runs.items():
            tokens = sum(job.new_tokens for job in jobs[key[0]])
            start = time.perf_counter()
            run()
            rates[key].append(tokens / (time.perf_counter() - start))
    return _results(options, artifact, rates)


def _octavo(llm: LLM, jobs: list[Job]) -> None:
    params = [
        SamplingParams(
            temperature=0.0, max_tokens=job.new_tokens, ignore_eos=True, detokenize=False
        )
        for job in jobs
    ]
    outputs = llm.generate([job.prompt for job in jobs], params, use_tqdm=False)
    got = [len(output.outputs[0].token_ids) for output in outputs]
    assert got == [job.new_tokens for job in jobs]


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
        read_bandwidth=machine.read_bandwidth(),
        matmul_rate=machine.matmul_rate(),
        weight_bytes=sum(p.stat().st_size for p in (artifact / "weights").glob("*.safetensors")),
        figures=figures,
        ratios=[
            report.Ratio(load, against, medians[load, "octavo"] / medians[load, against], target)
            for (load, against), target in TARGETS.items()
        ],
    )


if __name__ == "__main__":
    main()
