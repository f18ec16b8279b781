"""Each keyword works, is named in a notice, or is an error."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

from octavo.runtime.errors import InvalidRequest
from octavo.runtime.llm_options import CHECKS, IGNORED, ONLY, LLMOptions, resolve_options


def test_every_option_has_one_row() -> None:
    assert {field.name for field in fields(LLMOptions)} == set(CHECKS)
    assert not set(CHECKS) & set(ONLY)
    assert not set(CHECKS) & set(IGNORED)
    assert not set(ONLY) & set(IGNORED)


def test_what_works() -> None:
    options, notices = resolve_options(
        {
            "dtype": torch.bfloat16,
            "seed": 3,
            "max_model_len": 100,
            "gpu_memory_utilization": 0.5,
            "tensor_parallel_size": 1,
            "max_num_seqs": None,
        }
    )
    assert options == LLMOptions(
        dtype="bf16", seed=3, max_model_len=100, gpu_memory_utilization=0.5
    )
    assert notices == []


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("auto", None), ("half", "f16"), ("float32", "f32"), (torch.float32, "f32"), (None, None)],
)
def test_names_of_dtypes(dtype: Any, expected: str | None) -> None:
    assert resolve_options({"dtype": dtype})[0].dtype == expected


@pytest.mark.parametrize(
    ("name", "expected"), [("auto", None), ("fp8", "fp8"), ("fp8_e4m3", "fp8"), ("int8", "int8")]
)
def test_names_of_kv_caches(name: str, expected: str | None) -> None:
    assert resolve_options({"kv_cache_dtype": name})[0].kv_cache_dtype == expected


def test_what_changes_nothing_is_named() -> None:
    _, notices = resolve_options({"max_seq_len_to_capture": 8192, "swap_space": 4})
    assert notices == [
        "max_seq_len_to_capture has no effect: the sizes of CUDA graphs follow from max_num_seqs",
        "swap_space has no effect: kv_offload_gb is the host memory that blocks may go to",
    ]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("tensor_parallel_size", 2, "not supported by this version; use 1"),
        ("speculative_config", {"a": 1}, "not supported by this version; use None"),
        ("kv_cache_dtype", "fp8_e5m2", "must be auto, fp8 or int8"),
        ("dtype", "int7", "auto, float32, bfloat16 or float16"),
        ("dtype", 5, "auto, float32, bfloat16 or float16"),
        ("max_model_len", 1, "at least 2"),
        ("max_num_seqs", -1, "at least 1"),
        ("max_num_seqs", 1.5, "an integer"),
        ("max_num_seqs", 2**31, "at most 2147483647"),
        ("max_num_batched_tokens", 10**20, "at most 2147483647"),
        ("block_size", 2**31, "at most 2147483647"),
        ("num_gpu_blocks_override", 2**31, "at most 2147483647"),
        ("max_num_batched_tokens", True, "an integer"),
        ("block_size", 0, "at least 1"),
        ("gpu_memory_utilization", 0, "above 0"),
        ("gpu_memory_utilization", 1.1, "at most 1"),
        ("gpu_memory_utilization", "most", "a number"),
        ("kv_cache_memory_bytes", 0, "at least 1"),
        ("num_gpu_blocks_override", 0, "at least 1"),
        ("kv_offload_gb", -1, "at least 0"),
        ("kv_offload_gb", "all", "a number"),
        ("seed", "x", "an integer"),
        ("scheduling_policy", "lifo", "must be one of fcfs, .*, fair, got 'lifo'"),
        ("ageing_ms", 0, "at least 1"),
        ("result_cache_size", -1, "at least 0"),
        ("check_invariants", 1, "True or False"),
        ("enable_prefix_caching", "yes", "True or False"),
        ("tokenizer", 5, "a directory"),
        ("generation_config", "x", "'auto' or 'vllm'"),
    ],
)
def test_impossible_values(name: str, value: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        resolve_options({name: value})
    assert name in str(caught.value)


def test_an_unknown_keyword_is_a_type_error_with_a_guess() -> None:
    with pytest.raises(TypeError, match="'max_model_length'; did you mean 'max_model_len'"):
        resolve_options({"max_model_length": 5})
    with pytest.raises(TypeError, match=r"'zzz'$"):
        resolve_options({"zzz": 5})
