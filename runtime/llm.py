"""LLM: prompts in, texts out."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from octavo.runtime.artifact import Artifact
from octavo.runtime.beam_search import (
    BeamSearch,
    BeamSearchOutput,
    BeamSearchParams,
    search,
)
from octavo.runtime.chat_messages import check_tools
from octavo.runtime.checked_params import checked_params
from octavo.runtime.engine import Engine
from octavo.runtime.errors import EngineError, InvalidRequest
from octavo.runtime.llm_options import LLMOptions, resolve_options
from octavo.runtime.load import load_engine
from octavo.runtime.output_processor import OutputKind
from octavo.runtime.outputs import EngineStats, GenerationStats, Logprob, RequestOutput
from octavo.runtime.progress import progress_bar
from octavo.runtime.prompts import Prompt, fit_prompts, parse_prompts, with_urgency
from octavo.runtime.sampling_params import SamplingParams
from octavo.runtime.timings import Timings
from octavo.runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

_GENERATION_CONFIG_NAMES = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "max_new_tokens": "max_tokens",
}
# What a chat template is given anyway, or Python keeps for itself.
_TAKEN_VARIABLES = frozenset(
    (
        *("add_generation_prompt", "continue_final_message"),
        *("chat_template", "messages", "self", "tools"),
    )
)


class LLM:
    """A compiled model, loaded. The names are vLLM's: a script for it runs with its import changed.

    ``model`` is an artifact directory. Keywords: see LLMOptions for those that work, and the tables
    beside it for those of vLLM's that are refused or named in a notice. Any number of threads may
    use one LLM: their requests share the engine's steps. ``last_stats`` is then of no one call.
    ``load_times`` are the seconds of each phase of the load.
    """

    def __init__(self, model: str | Path, **keywords: Any) -> None:
        """Raises ArtifactError, InvalidRequest (a ValueError), CapacityError, or TypeError."""
        check_model(model)
        self.options, notices = resolve_options(keywords)
        for notice in notices:
            logger.warning("%s", notice)
        timings = Timings()
        with timings.phase("open artifact"):
            self.artifact = self.open_artifact(model, self.options)
            self._tokenizer = self._open_tokenizer()
        self.engine: Engine = load_engine(self.artifact, self.options, self._tokenizer, timings)
        self.load_times = timings.seconds
        logger.info("loaded: %s", timings)
        self.last_stats = GenerationStats()
        self._num_requests = 0
        self._inboxes: dict[str, deque[RequestOutput]] = {}
        self._turn = threading.Lock()  # held by the one thread that uses the engine
        self._next_turn = threading.Lock()  # held by the one thread that waits for its turn
        self._abandoned: deque[str] = deque()

    def open_artifact(self, model: str | Path, options: LLMOptions) -> Artifact:
        """The artifact to run. A subclass that can compile makes one of a model here."""
        return Artifact.open(model, artifact_id=options.artifact_id, verify=options.verify)

    def generate(
        self,
        prompts: Any = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        prompt_token_ids: Any = None,
        priority: int | Sequence[int] | None = None,
        deadline_ms: float | Sequence[float | None] | None = None,
        queue_timeout_ms: float | Sequence[float | None] | None = None,
        client: str | Sequence[str] | None = None,
    ) -> list[RequestOutput]:
        """Continue each prompt; the results are in the order of the prompts.

        A prompt is a string, a list of token ids, ``{"prompt": ...}`` or
        ``{"prompt_token_ids": [...]}``; one or a list of them. A ``"cache_salt"`` beside these
        parts it from prompts with another. All else is one for all or one each: the sampling
        parameters, the priority (lower is more urgent; see ``scheduling_policy``), the times
        within which a prompt is to be answered and to be started, and the client whose it is.
        Raises InvalidRequest before anything is run.
        """
        if prompt_token_ids is not None:
            if prompts is not None:
                raise InvalidRequest("give prompts or prompt_token_ids, not both")
            prompts = prompt_token_ids
        parsed = with_urgency(
            self._parse(prompts),
            priority=priority,
            deadline_ms=deadline_ms,
            queue_timeout_ms=queue_timeout_ms,
            client=client,
        )
        return self._run(*self._fitted(parsed, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        **rendering: Any,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of a list of them.

        ``rendering``: ``chat_template`` (a template or a name), ``add_generation_prompt`` (True),
        ``continue_final_message`` (False), ``tools``, ``chat_template_kwargs``.
        """
        conversations = messages if _is_batch(messages) else [messages]
        parsed = [self._parse_chat(conversation, **rendering) for conversation in conversations]
        return self._run(*self._fitted(parsed, sampling_params), use_tqdm)

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Generator[str, None, None]:
        """The text of one answer in pieces. Closing the iterator ends the request.

        Raises InvalidRequest when there would be no text: without a tokenizer or detokenize=False.
        """
        parsed = self._parse(prompt)
        if len(parsed) != 1:
            raise InvalidRequest(f"stream takes one prompt, got {len(parsed)}; use generate")
        return self._stream(*self._fitted_for_text(parsed[0], sampling_params))

    def stream_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        sampling_params: SamplingParams | None = None,
        **rendering: Any,
    ) -> Generator[str, None, None]:
        """Like ``stream``, for a conversation; ``rendering`` as for ``chat``."""
        parsed = self._parse_chat(messages, **rendering)
        return self._stream(*self._fitted_for_text(parsed, sampling_params))

    def beam_search(
        self, prompts: Any, params: BeamSearchParams, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt; prompts are as for ``generate``."""
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequest(f"params must be BeamSearchParams, got {params!r:.80}")
        params = replace(params)  # checked again, as SamplingParams are
        before = self.engine.stats()
        searches = [
            BeamSearch(
                prompt.token_ids,
                params,
                eos_token_ids=self.engine.eos_token_ids,
                max_model_len=self.engine.max_model_len,
            )
            for prompt in self._fit(self._parse(prompts))
        ]
        with progress_bar("Searching", len(searches), is_wanted=use_tqdm) as advance:
            search(searches, self._next_logprobs, advance)
        self._close((), before)
        decode = None if self._tokenizer is None else self._tokenizer.decode
        return [each.best(decode) for each in searches]

    def prepare(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> tuple[Prompt, SamplingParams]:
        """One prompt tokenised, and its parameters checked, as ``generate`` does it.

        A Prompt is taken as it is. Runs nothing, so any thread may call it at any time. Raises
        InvalidRequest.
        """
        parsed = [prompt] if isinstance(prompt, Prompt) else self._parse(prompt)
        if len(parsed) != 1:
            raise InvalidRequest(f"one prompt is wanted here, got {len(parsed)}")
        [fitted], [params] = self._fitted(parsed, sampling_params)
        return fitted, params

    def prepare_chat(self, messages: Sequence[Mapping[str, Any]], **rendering: Any) -> Prompt:
        """A conversation as a prompt; ``rendering`` as for ``chat``. Any thread may call it."""
        return self._parse_chat(messages, **rendering)

    def submit(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        kind: OutputKind,
        **arrival: Any,
    ) -> None:
        """Queue what ``prepare`` gave; ``arrival`` goes to Engine.add_request.

        The caller has the engine to itself meanwhile. Raises InvalidRequest.
        """
        self.engine.add_request(
            request_id,
            prompt.token_ids,
            params,
            prompt=prompt.text,
            kind=kind,
            **{"cache_salt": prompt.cache_salt, **asdict(prompt.urgency), **arrival},
        )

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidRequest when there is none."""
        if self._tokenizer is None:
            raise InvalidRequest("the model came without a tokenizer; use token-id prompts")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's makers recommend in generation_config.json; else SamplingParams().

        A recommendation that this version cannot follow, or that makes no sense, is left out with
        a notice.
        """
        if self.options.generation_config == "vllm":
            return SamplingParams()
        config = self.artifact.model_json("generation_config.json")
        usable: dict[str, Any] = {}
        for theirs, ours in _GENERATION_CONFIG_NAMES.items():
            if config.get(theirs) is None:
                continue
            try:
                SamplingParams(**{ours: config[theirs]})
            except InvalidRequest as error:
                logger.warning("generation_config.json: %s is left out: %s", theirs, error)
            else:
                usable[ours] = config[theirs]
        return SamplingParams(**usable)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that the model knows: 0 to ``vocab_size - 1``."""
        return self.artifact.manifest.vocab_size

    def reset_prefix_cache(self) -> bool:
        """Forget the prompts and answers that were computed; True, as vLLM says when it is done."""
        with self._engine_turn():
            self.engine.reset_prefix_cache()
        return True

    def stats(self) -> EngineStats:
        """Totals since this LLM was made, and its state now."""
        return self.engine.stats()

    def _open_tokenizer(self) -> Tokenizer | None:
        if self.options.skip_tokenizer_init:
            return None
        if self.options.tokenizer is not None:
            return Tokenizer.from_directory(self.options.tokenizer)
        return Tokenizer.from_artifact(self.artifact)

    def _parse(self, prompts: Any, add_special_tokens: bool = True) -> list[Prompt]:
        return parse_prompts(
            prompts,
            tokenizer=self._tokenizer,
            vocab_size=self.vocab_size,
            add_special_tokens=add_special_tokens,
        )

    def _fit(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams] | None = None
    ) -> list[Prompt]:
        """The prompts, cut where the parameters say so. Raises InvalidRequest for one too long."""
        each = params or [SamplingParams()] * len(prompts)
        return fit_prompts(
            prompts,
            [one.truncate_prompt_tokens for one in each],
            tokenizer=self._tokenizer,
            max_model_len=self.engine.max_model_len,
        )

    def _fitted(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
    ) -> tuple[list[Prompt], list[SamplingParams]]:
        """Prompts and their parameters, ready to run."""
        checked = self._params_for(params, len(prompts))
        return self._fit(prompts, checked), checked

    def _parse_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Prompt:
        check_tools(tools)
        variables = chat_template_kwargs or {}
        if not isinstance(variables, Mapping) or not _TAKEN_VARIABLES.isdisjoint(variables):
            raise InvalidRequest(
                "chat_template_kwargs must be a dict of variables other than "
                f"{', '.join(sorted(_TAKEN_VARIABLES))}, got {variables!r:.200}"
            )
        text = self.get_tokenizer().render_chat(
            messages,
            chat_template=chat_template or self.options.chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            **variables,
        )
        # The template has written the special tokens: adding them again would double the BOS.
        return self._parse(text, add_special_tokens=False)[0]

    def _params_for(
        self, params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        given = [params] * count if isinstance(params, SamplingParams) else params
        if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
            raise InvalidRequest(
                "sampling_params must be SamplingParams or a list of them, one for each prompt, "
                f"got {params!r:.200}"
            )
        if len(given) != count:
            raise InvalidRequest(
                f"{len(given)} sampling parameters for {count} prompts; give one, or one each"
            )
        return [self._checked(item) for item in given]

    def _fitted_for_text(
        self, prompt: Prompt, params: SamplingParams | None
    ) -> tuple[Prompt, SamplingParams]:
        [fitted], [checked] = self._fitted([prompt], params)
        if checked.n > 1:
            raise InvalidRequest(f"stream gives one text, not n={checked.n}; use generate")
        if self._tokenizer is None:
            raise InvalidRequest("stream gives text, which needs a tokenizer; use generate")
        if not checked.detokenize:
            raise InvalidRequest(
                "stream gives text, and detokenize=False asks for none; leave detokenize out, or "
                "use generate"
            )
        return fitted, checked

    def _checked(self, params: SamplingParams) -> SamplingParams:
        return checked_params(
            params,
            vocab_size=self.vocab_size,
            max_logprobs=self.options.max_logprobs,
            has_tokenizer=self._tokenizer is not None,
            grammars=self.engine.grammars,
        )

    def _run(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], show_progress: bool
    ) -> list[RequestOutput]:
        before = self.engine.stats()
        request_ids: list[str] = []
        try:
            for prompt, each in zip(prompts, params, strict=True):
                request_ids.append(self._add(prompt, each, "final"))
            results: dict[str, RequestOutput] = {}
            with progress_bar("Generating", len(prompts), is_wanted=show_progress) as advance:
                for request_id in request_ids:
                    results[request_id] = self._next_output(request_id)
                    advance()
            return [results[request_id] for request_id in request_ids]
        finally:
            self._close(request_ids, before)

    def _next_logprobs(self, contexts: list[list[int]], count: int) -> list[dict[int, Logprob]]:
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=count, ignore_eos=True)
        prompts = [Prompt(tuple(context)) for context in contexts]
        completions = [
            output.outputs[0] for output in self._run(prompts, [params] * len(prompts), False)
        ]
        for completion in completions:
            if completion.finish_reason == "error":
                raise EngineError(str(completion.stop_reason))
        return [(completion.logprobs or [])[0] for completion in completions]

    def _stream(self, prompt: Prompt, params: SamplingParams) -> Generator[str, None, None]:
        before = self.engine.stats()
        request_ids = [self._add(prompt, params, "delta")]
        try:
            while True:
                output = self._next_output(request_ids[0])
                completion = output.outputs[0]
                if completion.text:
                    yield completion.text
                if completion.finish_reason == "error":
                    raise EngineError(str(completion.stop_reason))
                if output.finished:
                    return
        finally:
            self._close(request_ids, before)

    @contextmanager
    def _engine_turn(self) -> Iterator[None]:
        """The engine for this thread alone, for one step or less."""
        # Two locks, because a lock let go and asked for again at once mostly goes to the thread
        # that had it: here that thread must first get past the one that waits.
        with self._next_turn:
            self._turn.acquire()
        try:
            yield
        finally:
            self._turn.release()
            self._end_abandoned()

    def _add(self, prompt: Prompt, params: SamplingParams, kind: OutputKind) -> str:
        with self._engine_turn():
            request_id = str(self._num_requests)
            self._num_requests += 1
            self.submit(request_id, prompt, params, kind)
            self._inboxes[request_id] = deque()
        return request_id

    def _next_output(self, request_id: str) -> RequestOutput:
        """Step until the request has something to show; what others have is kept for them."""
        inbox = self._inboxes[request_id]
        while True:
            with self._engine_turn():
                if inbox:
                    return inbox.popleft()
                if not self.engine.is_live(request_id):
                    raise EngineError(f"request {request_id} was ended by a step that failed")
                for output in self.engine.step():
                    self._inboxes[output.request_id].append(output)

    def _end_abandoned(self) -> None:
        """Abort what nobody waits for any more, unless the engine is busy.

        Then its user comes here after the step. Waiting for it could be for ever: a stream that is
        left open is closed by the garbage collector, in any thread and in the middle of a step.
        """
        while self._abandoned and self._turn.acquire(blocking=False):
            try:
                while self._abandoned:
                    request_id = self._abandoned.popleft()
                    self.engine.abort_request(request_id)
                    self._inboxes.pop(request_id, None)
            finally:
                self._turn.release()

    def _close(self, request_ids: Sequence[str], before: EngineStats) -> None:
        self._abandoned.extend(request_ids)
        self._end_abandoned()
        after = self.engine.stats()
        self.last_stats = GenerationStats(
            prompt_tokens=after.prompt_tokens - before.prompt_tokens,
            output_tokens=after.output_tokens - before.output_tokens,
            prefill_seconds=after.prefill_seconds - before.prefill_seconds,
            decode_seconds=after.decode_seconds - before.decode_seconds,
        )


def check_model(model: Any) -> None:
    """Refuse what names no model at all."""
    if not isinstance(model, (str, os.PathLike)) or not os.fspath(model):
        raise InvalidRequest(f"model must be the path of an artifact or a model, got {model!r:.80}")


def _is_batch(messages: Any) -> bool:
    """Whether these are several conversations: their messages are mappings, they are not."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
    return is_list and bool(messages) and isinstance(messages[0], Sequence)
