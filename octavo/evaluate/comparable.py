"""Whether two models can be compared token by token: told before either of them runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.frontend.config import read_config
from octavo.frontend.positions import stated_positions
from octavo.frontend.refused import RefusedArchitecture
from octavo.frontend.source import ModelSource
from octavo.ir.errors import OctavoError
from octavo.runtime.artifact import Artifact
from octavo.runtime.tokenizer import Tokenizer
from octavo.source_tokenizer import source_tokenizer

_SIZES = ("num_hidden_layers", "hidden_size")  # that transformers gives every config


@dataclass(frozen=True)
class Identity:
    """What a model is, without its weights.

    ``architecture`` is in words, with its sizes. ``max_position`` is None where a config states
    none, ``tokens`` where there is no tokenizer; they are those that text is read as, by id.
    """

    name: str
    architecture: str
    vocab_size: int
    max_position: int | None
    tokens: Mapping[int, str] | None


def check_comparable(model: Identity, reference: Identity, context: int) -> list[str]:
    """Raise OctavoError unless both can take ``context`` tokens of one vocabulary; returns what to
    say all the same."""
    difference = _vocabulary_difference(model, reference)
    if difference is not None:
        raise OctavoError(
            f"{model.name} and {reference.name} have different vocabularies: {difference}; next"
            " tokens can be compared of one vocabulary only, so give --against a model that shares"
            " it, such as the one that the artifact was made of"
        )
    for each in (model, reference):
        if each.max_position is not None and context > each.max_position:
            raise OctavoError(
                f"a context of {context} tokens: {each.name} takes at most {each.max_position};"
                f" choose --context {each.max_position} or less"
            )
    if model.architecture == reference.architecture:
        return []
    return [
        f"{model.name} is {model.architecture}, {reference.name} is {reference.architecture}: the"
        " figures tell two models apart, not what compiling one of them has changed"
    ]


def _vocabulary_difference(model: Identity, reference: Identity) -> str | None:
    if model.vocab_size != reference.vocab_size:
        return f"{model.vocab_size} and {reference.vocab_size} tokens"
    if model.tokens is None or reference.tokens is None:
        return None
    # Of ids that both name: a GGUF fills the vocabulary up to its size, a tokenizer.json does not.
    for token_id in sorted(model.tokens.keys() & reference.tokens.keys()):
        one, other = model.tokens[token_id], reference.tokens[token_id]
        if one != other:
            return f"token {token_id} is {one!r} in the one and {other!r} in the other"
    return None


def identify_artifact(artifact: Artifact) -> Identity:
    """Of an artifact, by its manifest and what it keeps of the model's files."""
    manifest, path = artifact.manifest, artifact.model_file("config.json")
    tokenizer = Tokenizer.from_artifact(artifact)
    return Identity(
        str(artifact.root),
        manifest.model_type if path is None else _architecture(read_config(path)),
        manifest.vocab_size,
        manifest.max_position,
        None if tokenizer is None else tokenizer.text_tokens(),
    )


def identify_source(source: ModelSource) -> Identity:
    """Of what can be compiled, by its config and its tokenizer. Raises OctavoError."""
    tokenizer = source_tokenizer(source)
    return Identity(
        source.name,
        _architecture(source.config),
        int(source.config.get_text_config().vocab_size),
        _max_position(source.config),
        None if tokenizer is None else tokenizer.text_tokens(),
    )


def _architecture(config: Any) -> str:
    text = config.get_text_config()
    sizes = ", ".join(f"{name} {getattr(text, name, None)}" for name in _SIZES)
    return f"a {config.model_type} of {sizes}"


def _max_position(config: Any) -> int | None:
    try:
        return stated_positions(config)
    except RefusedArchitecture:
        return None
