"""Text to token ids and back, by the model's own tokenizer.json.

Uses the ``tokenizers`` package alone: transformers, which wraps it, takes seconds to import.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from octavo.runtime.artifact import Artifact, read_json_object
from octavo.runtime.chat_template import ChatTemplate
from octavo.runtime.errors import ArtifactError, InvalidRequest

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")


class Tokenizer:
    """The model's tokenizer, with its special tokens and chat templates."""

    def __init__(
        self, raw: RawTokenizer, config: Mapping[str, Any], templates: Mapping[str, str]
    ) -> None:
        """``config`` is tokenizer_config.json's object, ``templates`` chat templates by name."""
        self._raw = raw
        self._templates = dict(templates)
        self._compiled: dict[str, ChatTemplate] = {}
        raw.no_truncation()
        raw.no_padding()
        self._add_missing_tokens(config)
        self.special_tokens = _special_tokens(config)
        named = [t for t in self.special_tokens.values() if raw.token_to_id(t) is not None]
        raw.add_special_tokens(named)
        added = raw.get_added_tokens_decoder()
        self.special_token_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def from_artifact(cls, artifact: Artifact) -> Tokenizer | None:
        """The artifact's tokenizer, None when it has none (token-id prompts still work)."""
        path = artifact.model_file("tokenizer.json")
        if path is None:
            return None
        template = artifact.model_file("chat_template.jinja")
        return cls._from_files(path, artifact.model_json("tokenizer_config.json"), template)

    @classmethod
    def from_directory(cls, directory: str | Path) -> Tokenizer:
        """The tokenizer of a model directory: tokenizer.json and what lies beside it."""
        root = Path(directory)
        if not (root / "tokenizer.json").is_file():
            raise InvalidRequest(f"{root} has no tokenizer.json; give a directory that has one")
        config, template = root / "tokenizer_config.json", root / "chat_template.jinja"
        return cls._from_files(
            root / "tokenizer.json",
            read_json_object(config) if config.is_file() else {},
            template if template.is_file() else None,
        )

    @classmethod
    def _from_files(cls, path: Path, config: Mapping[str, Any], template: Path | None) -> Tokenizer:
        try:
            raw = RawTokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise ArtifactError(f"{path} is not a tokenizer: {error}") from None
        templates = _named_templates(config.get("chat_template"))
        if template is not None:  # the file has the last word, as in transformers
            templates["default"] = template.read_text("utf-8")
        return cls(raw, config, templates)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return self._raw.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._named_id("eos_token")

    def text_tokens(self) -> dict[int, str]:
        """The tokens that text is cut into, by id: all but added ones, which tunings rename."""
        vocabulary = self._raw.get_vocab(with_added_tokens=False)
        added = self._raw.get_added_tokens_decoder()
        return {number: token for token, number in vocabulary.items() if number not in added}

    def to_json(self) -> str:
        """As tokenizer.json has it, with the tokens that only its configuration lists."""
        text: str = self._raw.to_str()
        return text

    @property
    def chat_templates(self) -> dict[str, str]:
        """The model's chat templates by name; one alone is "default"."""
        return dict(self._templates)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; with the special tokens that the tokenizer's post-processor adds."""
        # Unlike `encode`, the batch lets other threads run: a long prompt must not stop the engine.
        [encoding] = self._raw.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of token ids; an id that the tokenizer does not know has none."""
        text: str = self._raw.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, token: str) -> int | None:
        found: int | None = self._raw.token_to_id(token)
        return found

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        found: str | None = self._raw.id_to_token(token_id)
        return found

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """A conversation as the prompt text that the model was trained on.

        ``chat_template`` is a template or the name of one of the model's. The text holds its
        special tokens already: encode it with ``add_special_tokens=False``.
        """
        source = self._template_source(chat_template, variables.get("tools") is not None)
        if source not in self._compiled:
            self._compiled[source] = ChatTemplate(source)
        return self._compiled[source].render(messages, **{**self.special_tokens, **variables})

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> str | list[int]:
        """transformers' name for the same, with its defaults: token ids, or text."""
        text = self.render_chat(
            conversation, add_generation_prompt=add_generation_prompt, **variables
        )
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _template_source(self, wanted: str | None, has_tools: bool) -> str:
        if wanted is not None:
            return self._templates.get(wanted, wanted)
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        if self._templates:
            raise InvalidRequest(
                f"the model has several chat templates, {', '.join(sorted(self._templates))}, and "
                "no default; name one with chat_template"
            )
        raise InvalidRequest(
            "the model has no chat template; pass one with chat_template, or use generate"
        )

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.convert_tokens_to_ids(token)

    def _add_missing_tokens(self, config: Mapping[str, Any]) -> None:
        """Tokens that only tokenizer_config.json lists, in the order of their ids."""
        listed = config.get("added_tokens_decoder") or {}
        for _, entry in sorted(listed.items(), key=lambda item: int(item[0])):
            if self._raw.token_to_id(entry["content"]) is None:
                self._raw.add_tokens([AddedToken(**_token_fields(entry))])


def _token_fields(entry: Mapping[str, Any]) -> dict[str, Any]:
    known = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    return {key: entry[key] for key in known if key in entry}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Named special tokens by name; an entry is a string or an object with its content."""
    named = {name: config.get(name) for name in _NAMED_TOKENS}
    texts = {k: v.get("content") if isinstance(v, Mapping) else v for k, v in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _named_templates(entry: Any) -> dict[str, str]:
    if isinstance(entry, str):
        return {"default": entry}
    return {item["name"]: item["template"] for item in entry or []}
