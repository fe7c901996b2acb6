"""Triton's kernels compiled for GPUs that are not here: registers, spills and shared memory.

What ptxas says is all there is: no GPU has run them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ascend_ops._kernels.triton import alibi_attention, rms_norm, rotary, swiglu

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no triton"),
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing"
    ),
]
SMALLEST = (
    99 << 10
)  # bytes of shared memory: sm_80 has 163 KiB and sm_90 227, sm_86 and sm_89 these


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
        from triton import knobs
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
        with knobs.nvidia.scope(), contextlib.redirect_stdout(io.StringIO()) as said:
            knobs.nvidia.dump_ptxas_log = True
            made = triton.compile(source, target=target, options=compiling)
        registers = re.search(r"Used (\d+) registers", said.getvalue())
        spilled = re.findall(r"(\d+) bytes spill", said.getvalue())
        assert registers is not None and spilled, said.getvalue()
        assert made.metadata.shared <= SMALLEST
        counts = int(registers[1]), sum(map(int, spilled))
        return Compiled(*counts, made.metadata.shared, made.asm["ptx"])

    return compile_it


COLUMNS = ("gate_column", "up_column", "grad_column", "inner")


@pytest.mark.parametrize(("dtype", "everything"), [("bf16", False), ("fp32", True)])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_swiglu(compiled: Compile, name: str, dtype: str, everything: bool) -> None:
    constants = {"HAS_BIAS": everything, "HAS_LIMIT": everything, "ROWS": 1}
    ones = COLUMNS if name == "backward" else ("gate_column", "up_column", "inner")
    options = dict(swiglu.COMPILING)
    made = compiled(
        "swiglu", name, dtype, options, {**constants, "COLUMNS": swiglu.TILE}, ones=ones
    )
    assert made.spilled == 0 and made.registers <= 128
    each = swiglu.TILE // (32 * options["num_warps"])
    loads, bytes_each = 3 if name == "backward" else 2, 4 if dtype == "fp32" else 2
    wide = re.findall(r"ld\.global(?:\.\w+)*\.v4\.b32", made.ptx)
    if not everything:  # 16 bytes at a time
        assert len(wide) == loads * each * bytes_each // 16
    assert "fma.rn.f32" not in _without_exponentials(made.ptx)
    if everything:  # rows that are short, of strides that are not 1
        tile = {"ROWS": 8, "COLUMNS": swiglu.TILE // 8}
        assert compiled("swiglu", name, dtype, options, {**constants, **tile}).spilled == 0


def _without_exponentials(ptx: str) -> str:
    """Without the multiplication by log2(e) and what else an exponential is made of."""
    return re.sub(r"fma\.rn\.f32[^;]*;\s*ex2", "ex2", ptx)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("bf16", 128), ("fp32", rms_norm.LONGEST), ("bf16", 16384)],
)
def test_rms_norm(compiled: Compile, dtype: str, width: int) -> None:
    columns, single = min(width, rms_norm.LONGEST), width <= rms_norm.LONGEST
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
        assert made.spilled == 0


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
def test_rotary(compiled: Compile, interleaved: bool) -> None:
    constants = {"INTERLEAVED": interleaved, "INVERSE": True, "PAIRS": 32, "LEFT": 32}
    constants["ROWS"] = rotary.TILE // 32
    made = compiled(
        "rotary",
        "forward",
        "bf16",
        dict(rotary.COMPILING),
        constants,
        pointers={"cos": "fp32", "sin": "fp32"},
        ones=("x_column", "cos_column", "sin_column"),
    )
    assert made.spilled == 0 and made.registers <= 128
    assert "fma.rn.f32" not in made.ptx


WIDE = {"slopes": "fp32", "lse": "fp32", "delta": "fp32", "partials": "fp32", "mask": "u8"}
KERNELS = ("forward", "backward_of_queries", "backward_of_keys")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    ("dtype", "width"), [("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp32", 64)]
)
def test_alibi_attention(compiled: Compile, name: str, dtype: str, width: int) -> None:
    blocks = alibi_attention.blocks_of(name, width, 4 if dtype == "fp32" else 2)
    options = blocks.options()
    constants = {"CAUSAL": True, "HAS_WINDOW": True, "HAS_MASK": True}
    constants |= {"WIDTH": width, "V_WIDTH": width}
    constants |= {size: options.pop(size) for size in ("ROWS", "KEYS")}
    if name == "backward_of_queries":
        constants["SLOPES_GRAD"] = True
    ones = ("mask_key", "slopes_head")
    made = compiled("alibi_attention", name, dtype, options, constants, pointers=WIDE, ones=ones)
    assert made.spilled == 0
    assert ("mma" in made.ptx) == (dtype == "bf16")  # FP32 products are FP32's
