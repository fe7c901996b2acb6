"""Triton's kernels compiled for GPUs that are not here: registers, spills and shared memory.

What ptxas says is all there is: no GPU has run them.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ascend_ops._kernels.triton import rms_norm, rotary, swiglu

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no triton"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
    ),
]
SHARED = {80: 163 << 10, 90: 227 << 10}  # bytes that a block may have at most
SMALLEST = 99 << 10  # of the GPUs that Triton knows: sm_86 and sm_89 have no more


@dataclass(frozen=True)
class Compiled:
    """A kernel as ptxas made it."""

    registers: int
    spilled: int
    shared: int
    ptx: str


Compile = Callable[..., Compiled]


@pytest.fixture(params=[80, 90], ids="sm_{}".format)
def compiled(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Compile:
    """Compile a kernel, of which a pointer is one to `dtype` where `pointers` does not say."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compile_it(
        operator: str,
        name: str,
        dtype: str,
        compiling: dict[str, Any],
        constants: dict[str, Any],
        *,
        pointers: dict[str, str] | None = None,
        floats: tuple[str, ...] = ("limit", "eps", "scale"),
        ones: tuple[str, ...] = (),
    ) -> Compiled:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        module = importlib.import_module(f"ascend_ops._kernels.triton_kernels.{operator}")
        kernel = getattr(module, name)
        constants = {**constants, **dict.fromkeys(ones, 1)}
        signature: dict[str, str] = {}
        for parameter in kernel.arg_names:
            if parameter in constants:
                signature[parameter] = "constexpr"
            elif kernel.fn.__annotations__[parameter] == "Pointer":
                signature[parameter] = f"*{(pointers or {}).get(parameter, dtype)}"
            else:
                signature[parameter] = "fp32" if parameter in floats else "i32"
        aligned = {
            (at,): [["tt.divisibility", 16]]
            for at, kind in enumerate(signature.values())
            if kind == "i32" or kind.startswith("*")
        }
        source = ASTSource(kernel, signature, constants, aligned)
        target = GPUTarget("cuda", request.param, 32)
        made = triton.compile(source, target=target, options=compiling)
        return _assembled(made, request.param, tmp_path)

    return compile_it


def _assembled(made: Any, capability: int, folder: Path) -> Compiled:
    from triton import knobs

    text = folder / "kernel.ptx"
    text.write_text(made.asm["ptx"])
    arch = re.search(r"\.target (sm_\w+)", made.asm["ptx"])
    assert arch is not None
    command = [knobs.nvidia.ptxas.path, "-v", f"--gpu-name={arch[1]}", str(text)]
    command += ["-o", str(folder / "kernel.cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = re.search(r"Used (\d+) registers", said)
    spilled = re.findall(r"(\d+) bytes spill", said)
    assert registers is not None and spilled, said
    assert made.metadata.shared <= min(SHARED[capability], 1 << 30)
    return Compiled(
        int(registers[1]), sum(map(int, spilled)), made.metadata.shared, made.asm["ptx"]
    )


COLUMNS = ("gate_column", "up_column", "grad_column", "inner")


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("everything", [False, True], ids=["plain", "bias and limit"])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_swiglu(compiled: Compile, name: str, dtype: str, everything: bool) -> None:
    constants = {"HAS_BIAS": everything, "HAS_LIMIT": everything, "ROWS": 1}
    ones = COLUMNS if name == "backward" else ("gate_column", "up_column", "inner")
    options = dict(swiglu.COMPILING)
    made = compiled(
        "swiglu", name, dtype, options, {**constants, "COLUMNS": swiglu.TILE}, ones=ones
    )
    assert made.spilled == 0 and made.registers <= 128 and made.shared <= SMALLEST
    each = swiglu.TILE // (32 * options["num_warps"])
    loads, bytes_each = 3 if name == "backward" else 2, 4 if dtype == "fp32" else 2
    wide = re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", made.ptx)
    if not everything:  # 16 bytes at a time
        assert len(wide) == loads * each * bytes_each // 16
    assert "fma.rn.f32" not in _without_exponentials(made.ptx)
    strided = compiled("swiglu", name, dtype, options, {**constants, "ROWS": 8, "COLUMNS": 256})
    assert strided.spilled == 0


def _without_exponentials(ptx: str) -> str:
    """Without the multiplication by log2(e) and what else an exponential is made of."""
    return re.sub(r"fma\.rn\.f32[^;]*;\s*ex2", "ex2", ptx)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("width", "single"), [(64, True), (2048, True), (rms_norm.LONGEST, True), (16384, False)]
)
def test_rms_norm(compiled: Compile, dtype: str, width: int, single: bool) -> None:
    columns = min(width, rms_norm.LONGEST)
    rows = max(1, rms_norm.TILE // columns)
    weighted = {"HAS_WEIGHT": True, "UNIT": False}
    tile = {"ROWS": rows, "COLUMNS": columns}
    options = rms_norm.compiling(rows * columns)
    of_x, both = ("x_column",), ("x_column", "grad_column")
    kernels = [
        compiled(
            "rms_norm", "forward", dtype, options, {**weighted, **tile, "SINGLE": single}, ones=of_x
        )
    ]
    wide = {"pointers": {"partials": "fp32", "rstds": "fp32"}, "ones": both}
    if single:
        constants = {**weighted, **tile, "WEIGHT_GRAD": True}
        kernels.append(compiled("rms_norm", "backward", dtype, options, constants, **wide))
    else:
        constants = {**weighted, "COLUMNS": rms_norm.LONGEST // 2}
        options = rms_norm.compiling(rms_norm.LONGEST // 2)
        name = "backward_of_rows"
        kernels.append(compiled("rms_norm", name, dtype, options, constants, **wide))
        constants, options = {"COLUMNS": rms_norm.TILE}, rms_norm.compiling(rms_norm.TILE)
        name = "backward_of_weight"
        kernels.append(compiled("rms_norm", name, dtype, options, constants, **wide))
    for made in kernels:
        assert made.spilled == 0 and made.shared <= SMALLEST


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("pairs", [32, 64])
def test_rotary(compiled: Compile, dtype: str, interleaved: bool, pairs: int) -> None:
    constants = {"INTERLEAVED": interleaved, "INVERSE": False, "PAIRS": pairs, "LEFT": 64 - pairs}
    constants["ROWS"] = rotary.TILE // 64
    made = compiled(
        "rotary",
        "forward",
        dtype,
        dict(rotary.COMPILING),
        constants,
        pointers={"cos": "fp32", "sin": "fp32"},
        ones=("x_column", "cos_column", "sin_column"),
    )
    assert made.spilled == 0 and made.registers <= 128 and made.shared <= SMALLEST
    assert "fma.rn.f32" not in made.ptx
    assert math.log2(constants["ROWS"]) % 1 == 0
