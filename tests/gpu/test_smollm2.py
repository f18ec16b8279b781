"""SmolLM2 on the GPU, in bf16 and fp16, says what Hugging Face says: graphs on and off.

``OCTAVO_SMOLLM2_GGUF`` names the file: a machine with a GPU need not have a network.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from octavo.compile import compile_model
from octavo.runtime.llm import LLM
from tests.smollm2_golden import Golden, check_every_token

pytestmark = pytest.mark.gpu

GOLDEN = Golden.read()


@pytest.fixture(scope="module", params=["bfloat16", "float16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def artifact(dtype: str, session_dir: Path, request: pytest.FixtureRequest) -> Path:
    if not os.environ.get("OCTAVO_SMOLLM2_GGUF"):
        pytest.skip("OCTAVO_SMOLLM2_GGUF does not name SmolLM2's GGUF file")
    gguf = request.getfixturevalue("smollm2_gguf")
    folder = session_dir / f"smollm2-{dtype}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            compile_model(gguf, folder, dtype=dtype, target="cuda", dequantize=True, progress=False)
    return folder


def load(artifact: Path, **options: Any) -> LLM:
    return LLM(
        artifact,
        max_model_len=2048,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=256 << 20,
        skip_tokenizer_init=True,
        **options,
    )


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_all_in_one_batch(artifact: Path, dtype: str, eager: bool) -> None:
    llm = load(artifact, max_num_seqs=32, enforce_eager=eager)
    check_every_token(llm, GOLDEN.cases, GOLDEN.limit(dtype))


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_alone(artifact: Path, dtype: str, eager: bool) -> None:
    llm = load(artifact, max_num_seqs=1, enforce_eager=eager)
    for case in GOLDEN.cases[::4]:
        check_every_token(llm, [case], GOLDEN.limit(dtype))


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_prefill_in_chunks(artifact: Path, dtype: str, eager: bool) -> None:
    llm = load(artifact, max_num_seqs=32, long_prefill_token_threshold=7, enforce_eager=eager)
    check_every_token(llm, GOLDEN.cases, GOLDEN.limit(dtype))
