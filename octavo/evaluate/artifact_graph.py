"""The last stage of an artifact's IR, run by the interpreter with the weights that it stores."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from torch import Tensor

from octavo.calibrate.streamed_run import StreamedRun
from octavo.codegen.generate import weight_layouts
from octavo.codegen.lower import lower
from octavo.codegen.target import resolve_targets
from octavo.golden import StoredWeights
from octavo.ir.graph import Graph, Node
from octavo.ir.interpret import Result
from octavo.ir.parser import parse_graph
from octavo.runtime.artifact import Artifact
from octavo.runtime.errors import ArtifactError


def graph_values(artifact: Artifact, ids: Sequence[int]) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of the step for one sequence, by name, in order: ``[len, ...]`` and others."""
    graph = last_stage(artifact)
    found: list[tuple[str, Tensor]] = []

    def keep(node: Node, results: list[Result]) -> None:
        pairs = zip(node.outputs, results, strict=True)
        found.extend((value.name, result) for value, result in pairs if isinstance(result, Tensor))

    target = resolve_targets(artifact.manifest.target).main
    layouts = weight_layouts(lower(graph, target.rules).lines)
    weights = StoredWeights(graph, artifact.load_weights("cpu"), layouts)
    run = StreamedRun(graph, weights, [list(ids)], observe=keep)
    for node in graph.nodes:
        run.advance(node)
        yield from found
        found.clear()
    run.advance(None)
    yield from found


def last_stage(artifact: Artifact) -> Graph:
    """The graph that the program was written from. Raises ArtifactError."""
    index = artifact.file("ir/index.json")
    if index is None:
        raise ArtifactError(f"{artifact.root}: the manifest lists no ir/index.json")
    name = json.loads(index.read_text("utf-8"))["stages"][-1]["file"]
    path = artifact.file(f"ir/{name}")
    if path is None:
        raise ArtifactError(f"{artifact.root}: the manifest lists no ir/{name}")
    return parse_graph(path.read_text("utf-8"))
