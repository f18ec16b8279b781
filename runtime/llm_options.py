"""The keywords of LLM: vLLM's names, and what becomes of each here. A table, read top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from octavo.runtime.errors import InvalidRequest
from octavo.runtime.policies import POLICIES
from octavo.runtime.validation import boolean, integer, real

_DTYPE_NAMES = {
    "auto": None,
    "half": "f16",
    "float16": "f16",
    "fp16": "f16",
    "f16": "f16",
    "bfloat16": "bf16",
    "bf16": "bf16",
    "float": "f32",
    "float32": "f32",
    "fp32": "f32",
    "f32": "f32",
}


@dataclass(frozen=True)
class LLMOptions:
    """Options that work. None means: chosen from the model and the machine.

    The first group says what is compiled: an artifact must agree with it.
    """

    dtype: str | None = None  # a name of the IR: f32, bf16, f16
    quantization: str | None = None
    kv_cache_dtype: str | None = None  # fp8 or int8
    revision: str | None = None

    artifact_id: str | None = None
    verify: bool = True
    tokenizer: str | Path | None = None
    skip_tokenizer_init: bool = False
    chat_template: str | None = None
    generation_config: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    ageing_ms: float = 60_000.0
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    enable_prefix_caching: bool = True
    result_cache_size: int = 0  # answers that are kept to be given again
    kv_offload_gb: float = 0.0  # GiB of host memory for evicted blocks
    max_logprobs: int = 20
    async_scheduling: bool | None = None
    check_invariants: bool = False  # after each step: it finds faults of Octavo's, at a cost
    enforce_eager: bool = False
    load_format: str = "auto"


def _dtype(name: str, value: Any) -> str | None:
    text = str(value).removeprefix("torch.") if isinstance(value, (str, torch.dtype)) else ""
    if text not in _DTYPE_NAMES:
        raise InvalidRequest(f"{name} must be auto, float32, bfloat16 or float16, got {value!r}")
    return _DTYPE_NAMES[text]


_KV_CACHE_DTYPES = {"auto": None, "fp8": "fp8", "fp8_e4m3": "fp8", "int8": "int8"}


def _kv_cache_dtype(name: str, value: Any) -> str | None:
    if not isinstance(value, str) or value not in _KV_CACHE_DTYPES:
        raise InvalidRequest(f"{name} must be auto, fp8 or int8, got {value!r}")
    return _KV_CACHE_DTYPES[value]


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} must be a string, got {value!r}")
    return value


def _path(name: str, value: Any) -> str | Path:
    if not isinstance(value, (str, Path)):
        raise InvalidRequest(f"{name} must be a directory, got {value!r}")
    return value


def _share(name: str, value: Any) -> float:
    share = real(name, value, low=0.0, high=1.0)
    if share == 0.0:
        raise InvalidRequest(f"{name} must be above 0")
    return share


def _generation_config(name: str, value: Any) -> str:
    if value not in ("auto", "vllm"):
        raise InvalidRequest(f"{name} must be 'auto' or 'vllm', got {value!r}")
    return str(value)


def _scheduling_policy(name: str, value: Any) -> str:
    if value not in POLICIES:
        raise InvalidRequest(f"{name} must be one of {', '.join(POLICIES)}, got {value!r}")
    return str(value)


def _load_format(name: str, value: Any) -> str:
    if value not in ("auto", "safetensors", "dummy"):
        raise InvalidRequest(f"{name} must be 'auto', 'safetensors' or 'dummy', got {value!r}")
    return str(value)


_positive = partial(integer, low=1)
_positive_int32 = partial(integer, low=1, high=2**31 - 1)  # what the kernels count with

# Works: how a value is checked and cleaned.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "dtype": _dtype,
    "quantization": _text,
    "kv_cache_dtype": _kv_cache_dtype,
    "revision": _text,
    "artifact_id": _text,
    "verify": boolean,
    "tokenizer": _path,
    "skip_tokenizer_init": boolean,
    "chat_template": _text,
    "generation_config": _generation_config,
    "seed": partial(integer, low=-(2**63), high=2**64 - 1),
    "max_model_len": partial(integer, low=2),  # one token of a prompt and one of an answer
    "max_num_seqs": _positive_int32,
    "max_num_batched_tokens": _positive_int32,
    "long_prefill_token_threshold": partial(integer, low=0),
    "scheduling_policy": _scheduling_policy,
    "ageing_ms": partial(real, low=1.0),
    "block_size": _positive_int32,
    "gpu_memory_utilization": _share,
    "kv_cache_memory_bytes": _positive,
    "num_gpu_blocks_override": _positive_int32,
    "enable_prefix_caching": boolean,
    "result_cache_size": partial(integer, low=0),
    "kv_offload_gb": partial(real, low=0.0),
    "max_logprobs": partial(integer, low=-1),
    "async_scheduling": boolean,
    "check_invariants": boolean,
    "enforce_eager": boolean,
    "load_format": _load_format,
}

# Means something that this version does not do: only the values under which it changes nothing.
ONLY: dict[str, tuple[Any, ...]] = {
    "runner": ("auto", "generate"),
    "task": ("auto", "generate"),
    "convert": ("auto", "none"),
    "tensor_parallel_size": (1,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "cpu_offload_gb": (0,),
    "calculate_kv_scales": (False,),
    "enable_lora": (False,),
    "speculative_config": (),
    "speculative_model": (),
    "hf_overrides": ({},),
    "rope_scaling": ({},),
    "rope_theta": (),
    "logits_processors": ([], ()),
    "kv_transfer_config": (),
    "enable_return_routed_experts": (False,),
    "enable_prompt_embeds": (False,),
    "disable_sliding_window": (False,),
    "quantization_config": ({},),
}

# Changes nothing here, and why.
IGNORED: dict[str, str] = {
    "enable_chunked_prefill": "prompts are always prefilled in chunks",
    "trust_remote_code": "an artifact holds the only code that is run",
    "swap_space": "kv_offload_gb is the host memory that blocks may go to",
    "preemption_mode": "preempted requests are computed again, or swapped with kv_offload_gb",
    "disable_log_stats": "statistics are given by LLM.stats() and /metrics, not logged",
    "tokenizer_mode": "tokenizer.json is always read by the tokenizers package",
    "tokenizer_revision": "the tokenizer is the artifact's own",
    "download_dir": "an artifact is not downloaded",
    "hf_token": "an artifact is not downloaded",
    "config_format": "an artifact has one format",
    "hf_config_path": "the configuration is the artifact's own",
    "served_model_name": "it is an option of the server",
    "distributed_executor_backend": "there is one device",
    "disable_custom_all_reduce": "there is one device",
    "compilation_config": "the artifact is compiled already",
    "attention_config": "the artifact is compiled already",
    "attention_backend": "the artifact is compiled already",
    "max_seq_len_to_capture": "the sizes of CUDA graphs follow from max_num_seqs",
    "cuda_graph_sizes": "the sizes of CUDA graphs follow from max_num_seqs",
    "num_scheduler_steps": "one step is planned at a time",
    "max_num_partial_prefills": "any number of prompts may be part-way",
    "use_v2_block_manager": "there is one block manager",
    "device": "the artifact's target decides",
    "allowed_local_media_path": "prompts are text",
    "allowed_media_domains": "prompts are text",
    "limit_mm_per_prompt": "prompts are text",
    "mm_processor_kwargs": "prompts are text",
    "disable_mm_preprocessor_cache": "prompts are text",
    "pooler_config": "the model generates",
    "structured_outputs_config": "there is one engine for structured outputs, llguidance",
    "guided_decoding_backend": "there is one engine for structured outputs, llguidance",
    "profiler_config": "there is no profiler hook",
    "disable_async_output_proc": "there is one output path",
    "disable_cascade_attn": "there is one attention",
}


def resolve_options(keywords: Mapping[str, Any]) -> tuple[LLMOptions, list[str]]:
    """Options, and a notice for each keyword that changes nothing here.

    Raises InvalidRequest for an impossible value and TypeError for an unknown keyword.
    """
    for name in keywords:
        if name not in CHECKS and name not in ONLY and name not in IGNORED:
            raise TypeError(f"LLM() got an unexpected keyword argument {name!r}{_like(name)}")
    given = {name: value for name, value in keywords.items() if value is not None}
    for name in given.keys() & ONLY.keys():
        if given[name] not in ONLY[name]:
            allowed = ", ".join(map(repr, ONLY[name])) or "None"
            raise InvalidRequest(
                f"{name}={given[name]!r} is not supported by this version; use {allowed}"
            )
    notices = [f"{name} has no effect: {IGNORED[name]}" for name in given if name in IGNORED]
    values = {name: CHECKS[name](name, value) for name, value in given.items() if name in CHECKS}
    return LLMOptions(**values), notices


def _like(name: str) -> str:
    from difflib import get_close_matches

    known = [field.name for field in fields(LLMOptions)] + [*ONLY, *IGNORED]
    match = get_close_matches(name, known, n=1)
    return f"; did you mean {match[0]!r}?" if match else ""
