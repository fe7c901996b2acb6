"""Triton's kernels: run in its interpreter and on cuda, and compiled for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ascend_core import UnavailableError
from ascend_reuse_param import _choice
from ascend_reuse_param._kernels import triton_codec
from ascend_reuse_param._kernels.triton_codec import COMPILING, TritonCodec

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
has_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
compiles = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="with TRITON_INTERPRET=1 nothing is compiled"
)


def run(*arguments: str, **variables: str) -> None:
    """Run pytest in a process of its own, and show what it says if a test fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout=300"]
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [*command, *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout


@has_triton
@pytest.mark.timeout(900)
@pytest.mark.parametrize("file", ["on_triton.py", "test_bits.py"])
def test_kernels_are_right_in_the_interpreter(file: str) -> None:
    # (A binade is a minute there; on_triton.py has each low half beside high ones of every kind.)
    select = ["-k", "triton and not binade"] if file == "test_bits.py" else []
    run(str(HERE / file), *select, TRITON_INTERPRET="1")


@has_triton
@on_cuda
@pytest.mark.timeout(900)
def test_kernels_are_right_on_cuda() -> None:
    run(str(HERE / "on_triton.py"), TRITON_INTERPRET="0")


def test_what_imports_no_triton() -> None:
    modules = "ascend_reuse_param.optimizer, ascend_reuse_param._kernels.triton_adamw"
    code = f"import sys, {modules}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_triton_its_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, triton_codec._KERNELS, raising=False)
    with pytest.raises(UnavailableError, match=r"Triton cannot be imported\.\n.*triton") as caught:
        TritonCodec(torch.device("cpu"))
    assert 'kernels="eager"' in str(caught.value)


def test_without_triton_cuda_takes_torchs_operators(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, triton_codec._KERNELS, raising=False)
    monkeypatch.setattr(_choice, "EagerCodec", lambda device, rounding: (device, rounding))
    with pytest.warns(RuntimeWarning, match="more slowly, to the same bits: Triton cannot be"):
        chosen: Any = _choice.chosen_codec("auto", "half-away", cuda)
    assert chosen == (cuda, "half-away")


POINTERS = {
    "master": "*i32",
    "weight": "*i16",
    "residual": "*i16",
    "bitmap": "*u8",
    "fingerprints": "*i64",
    "weighted": "*i64",
    "plain": "*i64",
    "gradient": "*i16",
    "exp_avg": "*fp32",
    "exp_avg_sq": "*fp32",
    "max_exp_avg_sq": "*fp32",
}
# A step as torch's for-loop makes it on CUDA, by its sources.
STEP: dict[str, Any] = {
    "TO_EVEN": True,
    "IS_BF16": True,
    "MAXIMIZE": False,
    "AMSGRAD": False,
    "DECOUPLED": True,
    "COUPLED": False,
    "NEAR": True,
    "FUSED": True,
    "SQUARES_FIRST": True,
    "RECIPROCAL": True,
    "QUOTIENT_FIRST": True,
    "max_exp_avg_sq": None,
}
ELEMENTS = 4096 // (32 * COMPILING["num_warps"])  # of a thread
Ptx = Callable[..., str]


@pytest.fixture(params=[80, 90], ids="sm_{}".format)
def ptx(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ptx:
    """Compile a kernel for a GPU; ptxas, which is run too, refuses what that could not run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiled(
        name: str, constants: dict[str, Any], unaligned: tuple[str, ...] = (), numel: str = "i32"
    ) -> str:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        from ascend_reuse_param._kernels import triton_kernels

        kernel = getattr(triton_kernels, name)
        kinds = {name: "fp32" for name in kernel.arg_names} | POINTERS | {"numel": numel}
        kinds |= dict.fromkeys(constants, "constexpr")
        signature = {name: kinds[name] for name in kernel.arg_names}
        divisible = {
            name for name, kind in signature.items() if kind in (*POINTERS.values(), "i32")
        }
        aligned = {
            (kernel.arg_names.index(name),): [["tt.divisibility", 16]]
            for name in divisible - set(unaligned)
        }
        source = ASTSource(kernel, signature, constants, aligned)
        target = GPUTarget("cuda", request.param, 32)
        text: str = triton.compile(source, target=target, options=dict(COMPILING)).asm["ptx"]
        return text

    return compiled


def instructions(ptx: str) -> Counter[str]:
    """How many there are of each instruction."""
    return Counter(re.findall(r"^\s*(?:@!?%p\d+ )?([a-z]\w*(?:\.\w+)+) ", ptx, re.MULTILINE))


@has_triton
@compiles
def test_a_fused_step_compiles_to_correctly_rounded_instructions(ptx: Ptx) -> None:
    text = ptx("adamw", STEP)
    counts = instructions(text)
    assert counts["fma.rn.f32"] == 3 * ELEMENTS  # lerp_, addcmul_ and addcdiv_
    assert counts["mul.rn.f32"] == 4 * ELEMENTS  # decay, beta2, g * g, the reciprocal
    assert counts["div.rn.f32"] == counts["sqrt.rn.f32"] == ELEMENTS
    assert "ftz" not in text and "approx" not in text


@has_triton
@compiles
def test_a_step_that_is_not_fused_has_no_fused_instruction(ptx: Ptx) -> None:
    orders = {"SQUARES_FIRST": False, "RECIPROCAL": False, "QUOTIENT_FIRST": False}
    text = ptx("adamw", {**STEP, **orders, "FUSED": False})
    counts = instructions(text)
    assert "fma" not in text
    assert counts["add.rn.f32"] == 4 * ELEMENTS  # lerp_, addcmul_, eps and addcdiv_
    assert counts["mul.rn.f32"] == 6 * ELEMENTS
    assert counts["div.rn.f32"] == 2 * ELEMENTS
    assert "ftz" not in text and "approx" not in text


@has_triton
@compiles
@pytest.mark.parametrize(
    ("name", "constants", "loads", "stores"),
    [
        # Of 16 bytes each: 4 elements of FP32, 8 of BF16, residual or gradient.
        ("split", {"TO_EVEN": True}, ELEMENTS // 4, 2 * ELEMENTS // 8),
        ("join", {"TO_EVEN": True}, 2 * ELEMENTS // 8, ELEMENTS // 4),
        ("adamw", STEP, 3 * ELEMENTS // 8 + 2 * ELEMENTS // 4, 4 * ELEMENTS // 8 * 3 // 2),
    ],
)
def test_aligned_arrays_are_read_once_and_written_once_16_bytes_at_a_time(
    ptx: Ptx, name: str, constants: dict[str, Any], loads: int, stores: int
) -> None:
    counts = instructions(ptx(name, constants))
    assert counts["ld.global.v4.b32"] == loads
    assert counts["st.global.v4.b32"] == stores
    # Beside these: bytes of the bitmap, the fingerprint and its tables (8 each, twice in a step).
    assert not [one for one in counts if re.fullmatch(r"(ld|st)\.global\.b(16|32)", one)]


@has_triton
@compiles
@pytest.mark.parametrize("name", ["split", "join", "adamw"])
@pytest.mark.parametrize("exact", [True, False], ids=["nearest-even", "half-away"])
def test_kernels_compile_for_any_address_and_size(ptx: Ptx, name: str, exact: bool) -> None:
    constants = {**(STEP if name == "adamw" else {}), "TO_EVEN": exact}
    if not exact:
        constants["bitmap"] = None
    odd = ("weight", "residual", "bitmap", "gradient")
    counts = instructions(ptx(name, constants, odd))
    assert counts["ld.global.b16"] + counts["st.global.b16"] >= 2 * ELEMENTS
    assert ptx(name, constants, (*odd, "numel"), "i64")
    assert ptx(name, {**constants, "numel": 1})  # Triton makes a constant of 1
    if name == "adamw":
        every = {"AMSGRAD": True, "MAXIMIZE": True, "COUPLED": True, "DECOUPLED": False}
        rest = {key: value for key, value in constants.items() if key != "max_exp_avg_sq"}
        assert ptx(name, {**rest, **every, "NEAR": False})
