"""The table of safetensors dtypes against files that the safetensors library writes."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save

from octavo.ir.safetensors_dtypes import SAFETENSORS_DTYPES


@pytest.mark.parametrize("dtype", SAFETENSORS_DTYPES.values(), ids=str)
def test_the_library_writes_the_same_name(dtype: torch.dtype) -> None:
    content = save({"x": torch.zeros(3, dtype=torch.uint8).to(dtype)})
    length = int.from_bytes(content[:8], "little")
    name = json.loads(content[8 : 8 + length])["x"]["dtype"]
    assert SAFETENSORS_DTYPES[name] == dtype
