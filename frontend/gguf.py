"""GGUF weights under the model's names, one tensor at a time, as numbers or as codes and scales."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import MODEL_ARCH_NAMES, get_tensor_name_map, quants
from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

from octavo.frontend.checkpoint import read_into
from octavo.frontend.gguf_config import ROPE_FREQS
from octavo.frontend.gguf_header import GgufHeader, GgufTensor
from octavo.frontend.quantized.ggml import kept_scheme, unpack_rows
from octavo.frontend.quantized.packed_matrix import check_scales, checked
from octavo.frontend.weights import TensorInfo
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme
from octavo.ir.quant_tensor import QuantTensor, concat_rows

_CHUNK_ELEMENTS = 1 << 22  # dequantising needs temporaries several times the size of its output
_EXPERT_STACK = "_exps.weight"
_NUMBERS = ("F32", "F16", "BF16", "F64")


class GgufWeights:
    """A WeightSource over a GGUF file, and a QuantizedSource; `load` gives float32.

    Names come from the `gguf` package's table of the architecture, and what llama.cpp's converter
    did to the values (Q and K permuted for llama, norms plus one for gemma, transposes for gpt2)
    is undone by transformers' TENSOR_PROCESSORS. `model` is the meta-device model whose names are
    used.
    """

    def __init__(self, header: GgufHeader, model: Any) -> None:
        self._header = header
        processor_class: Any = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
        self._processor: Any = processor_class(config=model.config.to_dict())
        self._key_of = _name_map(header, model, self._processor)
        self._sources: dict[str, list[GgufTensor]] = {}
        for name, tensor in header.tensors.items():
            if name != ROPE_FREQS:  # read into the config
                key = self._key_of.get(name, self._key_of.get(name.removesuffix(".weight"), name))
                self._sources.setdefault(key, []).append(tensor)

    def keys(self) -> Collection[str]:
        return self._sources.keys()

    def info(self, key: str) -> TensorInfo:
        sources = self._sources[key]
        if sources[0].name.endswith(_EXPERT_STACK):
            # [experts, rows, columns]; gate and up are joined along the rows.
            experts, *rest = sources[0].shape
            rest[0] = sum(source.shape[1] for source in sources)
            return TensorInfo((experts, *rest), torch.float32)
        if len(sources) > 1:
            raise OctavoError(
                f"{self._header.path.name}: {' and '.join(source.name for source in sources)} are"
                f" both '{key}' of the model; expected one"
            )
        # A zero-stride stand-in goes through the same reshapes without the data.
        stand_in = np.broadcast_to(np.float32(-1), sources[0].shape)
        return TensorInfo(self._process(key, sources[0], stand_in).shape, torch.float32)

    def load(self, key: str) -> torch.Tensor:
        parsed: dict[str, Any] = {"tensors": {}}
        value: npt.NDArray[np.float32] | None = None
        for source in self._sources[key]:
            value = self._process(key, source, self._dequantize(source), parsed)
        if key in parsed["tensors"]:
            tensor: torch.Tensor = parsed["tensors"][key]
            return tensor
        return torch.from_numpy(np.ascontiguousarray(value, dtype=np.float32))

    def scheme(self, key: str) -> QuantScheme | None:
        """None for numbers, for types that are not kept, and where a converter mixed columns."""
        source = self._sources[key][0]
        kept = kept_scheme(source.type)
        if kept is None or len(source.shape) != 2 or self._rows_of(key) is None:
            return None
        return kept

    def columns(self, key: str) -> None:
        """Always None: blocks of GGML lie in the order of x."""
        return None

    def load_quantized(self, key: str) -> QuantTensor:
        """Codes and scales, with rows in the model's order."""
        source, order = self._sources[key][0], self._rows_of(key)
        if order is None or self.scheme(key) is None:
            raise KeyError(key)
        rows, columns = source.shape
        step = max(1, _CHUNK_ELEMENTS // columns)
        row_bytes = source.num_bytes // rows
        pieces = []
        for start in range(0, rows, step):
            packed = torch.empty((min(step, rows - start), row_bytes), dtype=torch.uint8)
            read_into(self._header.path, source.offset + start * row_bytes, packed.view(-1))
            pieces.append(unpack_rows(source.type, packed, columns))
        matrix = concat_rows(pieces)
        # A block of equal numbers has steps of zero.
        check_scales(source.name, matrix.scales, zero_is_sound=True)
        if matrix.offsets is not None:
            check_scales(source.name, matrix.offsets, zero_is_sound=True)
        ordered: dict[str, Any] = {name: part[order] for name, part in matrix.parts()}
        return checked(replace(matrix, **ordered))

    def kv_scales(self) -> dict[str, torch.Tensor]:
        """None: the format has no place for them."""
        return {}

    def notices(self) -> list[str]:
        """What is stored quantised and read as numbers, a line for each type."""
        left = Counter(
            sources[0].type.name
            for key, sources in self._sources.items()
            if sources[0].type.name not in _NUMBERS and self.scheme(key) is None
        )
        return [
            f"{self._header.path.name}: {count} tensors of type {name} are read as numbers"
            for name, count in sorted(left.items())
        ]

    def _rows_of(self, key: str) -> torch.Tensor | None:
        """The stored row of each row of the model, i64[N]; None where rows are not kept whole.

        Told by what becomes of a matrix of row numbers, so that it holds for any converter.
        """
        sources = self._sources[key]
        if len(sources) != 1 or len(sources[0].shape) != 2:
            return None
        rows = sources[0].shape[0]
        numbers = np.repeat(np.arange(rows, dtype=np.float32)[:, None], 2, axis=1)
        moved = torch.from_numpy(np.ascontiguousarray(self._process(key, sources[0], numbers)))
        order = moved[:, 0].long() if moved.shape == (rows, 2) else torch.zeros(0)
        is_whole = torch.equal(moved, order[:, None].expand(-1, 2).float())
        return order if is_whole and torch.equal(order.sort()[0], torch.arange(rows)) else None

    def _process(
        self,
        key: str,
        source: GgufTensor,
        values: npt.NDArray[np.float32],
        parsed: dict[str, Any] | None = None,
    ) -> npt.NDArray[np.float32]:
        # gpt2's processor takes the name output.weight as its own to store; here it needs nothing.
        if source.name == "output.weight":
            return values
        result = self._processor.process(
            values,
            source.name,
            tensor_key_mapping=self._key_of,
            parsed_parameters={"tensors": {}} if parsed is None else parsed,
        )
        processed: npt.NDArray[np.float32] = result.weights
        return processed

    def _dequantize(self, source: GgufTensor) -> npt.NDArray[np.float32]:
        out = np.empty(source.shape, dtype=np.float32)
        columns = source.shape[-1] if source.shape else 1
        rows = out.reshape(-1, columns)
        row_bytes = source.num_bytes // max(len(rows), 1)
        step = max(1, _CHUNK_ELEMENTS // max(columns, 1))
        for start in range(0, len(rows), step):
            part = rows[start : start + step]
            packed = torch.empty(len(part) * row_bytes, dtype=torch.uint8)
            read_into(self._header.path, source.offset + start * row_bytes, packed)
            part[:] = quants.dequantize(_typed(packed.numpy(), source, len(part)), source.type)
        return out


def _typed(data: npt.NDArray[np.uint8], source: GgufTensor, num_rows: int) -> npt.NDArray[Any]:
    # `dequantize` wants floats as floats and everything else as rows of bytes.
    name = source.type.name
    if name in ("F32", "F16", "F64"):
        return data.view({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[name]).reshape(num_rows, -1)
    return data.reshape(num_rows, -1)


def _name_map(header: GgufHeader, model: Any, processor: Any) -> dict[str, str]:
    """GGUF name to model name, as transformers' get_gguf_hf_weights_map makes it.

    That function builds the table again for every module of the model, which takes minutes.
    """
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == header.architecture)
    names = get_tensor_name_map(arch, model.config.num_hidden_layers)
    key_of: dict[str, str] = {}
    for key in model.state_dict():
        key = processor.preprocess_name(key)
        stem, dot, suffix = key.rpartition(".")
        if suffix not in ("weight", "bias"):
            stem, dot, suffix = key, "", ""
        gguf_name = names.get_name(stem)
        if gguf_name is None:
            processor.perform_fallback_tensor_mapping(key_of, dot + suffix, "", key)
        else:
            key_of.setdefault(gguf_name + dot + suffix, key)
    return key_of
