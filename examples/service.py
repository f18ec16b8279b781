"""An operator's first evening: load a model, warm it up, and see how it scales with the batch.

    python examples/service.py .cache/smollm2 --plot scaling.png
    python examples/service.py config.json                  # a model of that shape, random weights

MODEL is an artifact, a model that can be compiled, or a config.json alone. It runs wherever the
artifact does, on a CPU or on a GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from octavo.bench.machine import describe_machine, describe_model
from octavo.bench.measure import measure_decode, warm_up
from octavo.bench.plot import draw, require_matplotlib
from octavo.bench.results import Decode, Results, with_efficiency
from octavo.bench.roofline import measure_roofline
from octavo.bench.suite import artifact_of
from octavo.bench.traffic import Traffic
from octavo.runtime.artifact import Artifact
from octavo.runtime.device import device_for
from octavo.runtime.llm import LLM


def main(arguments: Sequence[str] | None = None) -> None:
    """Load, warm up, measure, draw."""
    options = _options(arguments)
    if options.plot is not None:
        require_matplotlib()
    # Weights cost nothing but time where only speed is asked for: on a GPU a config has none.
    dummy = options.model.suffix == ".json" and torch.cuda.is_available()
    with artifact_of(options.model, dummy=dummy) as path:
        results = serve(path, options, load_format="dummy" if dummy else "auto")
    if options.plot is not None:
        draw(results, options.plot)
        print(f"drawn into {options.plot}")


def serve(path: Path, options: argparse.Namespace, *, load_format: str) -> Results:
    """Run each batch size and print what comes out."""
    artifact = Artifact.open(path, verify=False)
    # Before the model is there: it takes memory for a moment.
    roofline = measure_roofline(device_for(artifact.manifest.target), artifact.dtype)

    start = time.perf_counter()
    llm = LLM(
        path,
        max_num_seqs=max(options.batch_size),
        max_model_len=options.input_len + options.output_len,
        load_format=load_format,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,  # a repeated prompt is to be computed again
    )
    print(f"loaded in {time.perf_counter() - start:.2f} s")
    start = time.perf_counter()
    warm_up(llm, max(options.batch_size), options.input_len, 1)
    print(f"warm after {time.perf_counter() - start:.2f} s")

    decodes: list[Decode] = []
    traffic = Traffic.of(artifact)
    print(f"{'batch':>6}{'tokens/s':>12}{'ms a step':>12}{'of roofline':>13}{'efficiency':>12}")
    for batch_size in options.batch_size:
        figure = measure_decode(
            llm,
            traffic,
            roofline,
            batch_size=batch_size,
            input_len=options.input_len,
            output_len=options.output_len,
        )
        decodes = with_efficiency([*decodes, figure])
        last = decodes[-1]
        print(
            f"{batch_size:>6}{last.tokens_per_second:>12,.1f}{last.step_ms:>12.3f}"
            f"{last.share:>13.0%}{last.efficiency:>12.0%}"
        )
    model = describe_model(artifact, load_format)
    return Results(describe_machine(), model, ["examples/service.py"], roofline, decodes)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--plot", type=Path)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
