"""Targets are chosen by name, and refused with what to do instead."""

from __future__ import annotations

import pytest
import torch

from octavo.codegen.target import CPU, resolve_target, resolve_targets
from octavo.ir.errors import OctavoError
from octavo.ir.quant_scheme import QuantScheme


def test_cpu() -> None:
    assert resolve_target("cpu").kind == "cpu"


@pytest.mark.parametrize(
    ("name", "arch"), [("cuda:sm_80", 80), ("cuda:sm_90", 90), ("cuda:sm_90a", 90)]
)
def test_cuda_needs_no_gpu_when_it_is_named(name: str, arch: int) -> None:
    target = resolve_target(name)
    assert (target.name, target.kind, target.arch) == (f"cuda:sm_{arch}", "cuda", arch)


@pytest.mark.parametrize("name", ["cuda:sm_75", "hip:gfx942"])
def test_targets_without_kernels_are_refused_by_name(name: str) -> None:
    with pytest.raises(OctavoError, match=f"no kernels for {name}; choose from auto, cpu, cuda"):
        resolve_target(name)


def test_this_machines_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert resolve_target("cuda").name == resolve_target("auto").name == "cuda:sm_90"


@pytest.mark.parametrize("capability", [None, (7, 5)])
def test_no_gpu_that_has_kernels(
    capability: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert resolve_target("auto").name == "cpu"
    with pytest.raises(OctavoError, match="this machine's GPU, and there is none of sm_80"):
        resolve_target("cuda")


def test_unknown_target() -> None:
    with pytest.raises(OctavoError, match="unknown target 'tpu'; choose from auto, cpu"):
        resolve_target("tpu")


def test_dtypes() -> None:
    resolve_target("cpu").check_dtype("bf16")
    with pytest.raises(OctavoError, match="no kernels for f16; choose --dtype from f32, bf16"):
        resolve_target("cpu").check_dtype("f16")


def test_several_targets() -> None:
    targets = resolve_targets("cuda:sm_90,sm_80, cuda:sm_89,sm_90")
    assert (targets.main.name, targets.archs) == ("cuda:sm_90", (90, 80, 89))
    assert resolve_targets("cpu").archs == ()
    for mixed in ("cpu,cuda:sm_90", "cuda:sm_90,cpu", "cpu,cpu"):
        with pytest.raises(OctavoError, match="only cuda targets can be combined"):
            resolve_targets(mixed)
    with pytest.raises(OctavoError, match="unknown target 'metal'"):
        resolve_targets("cuda:sm_90,metal")


@pytest.mark.parametrize("scheme", ["int8<1x*, f32>", "nf4<1x64, f32>", "f8e4m3<*x*, f32>"])
def test_the_cpu_runs_every_scheme(scheme: str) -> None:
    assert CPU.why_no_kernel(QuantScheme.parse(scheme)) is None


def test_old_gpus_have_no_8_bit_floats() -> None:
    scheme = QuantScheme.parse("f8e4m3<1x*, f32, x=f8e4m3>")
    for name in ("cuda:sm_80", "cuda:sm_86"):
        reason = resolve_target(name).why_no_kernel(scheme)
        assert reason is not None
        assert reason.startswith(f"{name} has no 8-bit floats")
        assert "choose int8, int4" in reason


def test_rows_are_looked_up_in_8_bits_with_a_scale_each() -> None:
    assert CPU.can_embed(QuantScheme.parse("int8<1x*, f32>"))
    assert not CPU.can_embed(QuantScheme.parse("int8<*x*, f32>"))
    assert not CPU.can_embed(QuantScheme.parse("int4<1x32, f32>"))
