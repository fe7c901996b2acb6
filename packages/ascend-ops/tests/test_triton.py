"""Triton's kernels: run in its interpreter and on cuda, and what happens where they cannot be."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ascend_core.errors import UnavailableError
from ascend_ops import _backends
from ascend_ops._kernels.triton import alibi_attention, rms_norm, rotary, swiglu
from ascend_ops._kernels.triton._trial import Comparison, Trial

HERE = Path(__file__).parent
OPERATORS = ("swiglu", "rms_norm", "rotary", "alibi_attention")
has_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
CPU = torch.device("cpu")


@has_triton
@pytest.mark.timeout(900)
@pytest.mark.parametrize("interpreted", ["1", pytest.param("0", marks=on_cuda)])
def test_kernels_are_right_where_they_run(interpreted: str) -> None:
    """In a process of its own: Triton decides when it is imported whether it interprets."""
    files = [str(HERE / f"on_triton_{operator}.py") for operator in OPERATORS]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300"]
    done = subprocess.run(
        [*command, *files],
        cwd=HERE.parents[2],
        env={**os.environ, "TRITON_INTERPRET": interpreted},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout


def test_what_launches_kernels_imports_no_triton() -> None:
    modules = ", ".join(f"ascend_ops._kernels.triton.{operator}" for operator in OPERATORS)
    code = f"import sys, {modules}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", [swiglu, rms_norm, rotary, alibi_attention])
def test_without_triton_its_kernels_are_refused(
    module: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    for operator in OPERATORS:
        kernels = f"ascend_ops._kernels.triton_kernels.{operator}"
        monkeypatch.delitem(sys.modules, kernels, raising=False)
    with pytest.raises(UnavailableError, match=r"Triton cannot be imported\.\n.*triton") as caught:
        module.load()  # type: ignore[attr-defined]
    assert 'backend="eager"' in str(caught.value)


@has_triton
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter has the CPU")
@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_without_a_device_its_kernels_are_refused() -> None:
    with pytest.raises(UnavailableError, match="cannot be used on cpu") as caught:
        swiglu.load()
    assert "0 active drivers" in str(caught.value)


def test_kernels_that_disagree_are_not_used() -> None:
    one, off = torch.ones(3), torch.full((3,), 1 + 2e-3)

    def failure(*comparison: Comparison) -> UnavailableError | None:
        return Trial(lambda device: iter(comparison)).failure(CPU)

    assert failure((one, one, 0), (one, off, 1e-2)) is None
    assert "they do not agree" in str(failure((one, one, 0), (one, off, 5e-4)))
    assert "they do not agree" in str(failure((one, off, 0)))
    assert "they do not agree" in str(failure((one, one.double(), 1e-2)))
    assert "they do not agree" in str(failure((one, one[:2], 1e-2)))
    assert "they do not agree" in str(failure((one * float("nan"), one, 1e-2)))


def test_what_triton_raises_is_said_and_asked_once_for_each_device() -> None:
    asked = []

    def broken(device: torch.device) -> Iterator[Comparison]:
        asked.append(device)
        raise OSError("no compiler")

    trial = Trial(broken)
    for _ in range(2):
        assert "ended with OSError: no compiler" in str(trial.failure(CPU))
    assert trial.failure(torch.device("cpu", 0)) is not None
    assert asked == [CPU, torch.device("cpu", 0)]
    if not torch.accelerator.is_available():
        with pytest.raises(UnavailableError, match="no compiler"):
            trial.demand()


def test_where_triton_is_missing_torchs_operators_compute_it_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing = UnavailableError("Triton cannot be imported.")
    eager = swiglu.EagerSwiglu()
    monkeypatch.setattr(
        _backends, "_load", lambda _, backend: eager if backend == "eager" else missing
    )
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with FakeTensorMode():
            x = torch.empty(2, device="cuda:0")
        chosen = _backends.choose("swiglu", None, x, (x,), -1, None, None)
    assert chosen == ("eager", eager)
    assert any("Triton cannot be imported" in str(one.message) for one in said)
