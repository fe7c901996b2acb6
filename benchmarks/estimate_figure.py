"""The figure of `docs/estimate.md`: bytes by kind at the peak, for one model and some plans.

python -m benchmarks.estimate_figure docs/figures/estimate-bytes.svg
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ascend_ddp.config import DDPConfig, ShardedConfig
from ascend_recompute.config import (
    RecomputeActivationConfig,
    RecomputeLayersConfig,
    RecomputeNormConfig,
)
from ascend_reuse_param.config import ReuseParamConfig
from ascend_suite import Estimate, ModelShape, estimate
from ascend_suite.plan import Plan
from ascend_swap.config import SwapAttentionConfig, SwapOptimizerConfig

LLAMA = ModelShape(
    layers=32, hidden=4096, heads=32, ffn=11008, seq=4096, vocab=32000, positions="rotary",
    tied=False, dtype="bfloat16", masters=True, fused_step=True, dp=8, micro_batches=4,
)  # fmt: skip
_BUCKETS = {"reduce-gradients": DDPConfig()}
_REBUILD = {
    "recompute-activation": RecomputeActivationConfig(),
    "recompute-norm": RecomputeNormConfig(),
}
_SWAP = {"swap-optimizer": SwapOptimizerConfig(swap_optimizer_times=128, master_weights=True)}
PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduce-gradients": _BUCKETS,
    "… + activation and norm": {**_BUCKETS, **_REBUILD},
    "… + reuse-fp32-param": {**_BUCKETS, **_REBUILD, "reuse-fp32-param": ReuseParamConfig()},
    "shard-optimizer": {
        "reduce-gradients": DDPConfig(mode="reduce-scatter"),
        "shard-optimizer": ShardedConfig(),
        **_REBUILD,
    },
    "swap-optimizer": {**_BUCKETS, **_SWAP, **_REBUILD},
    "… + swap-attention": {
        **_BUCKETS,
        **_SWAP,
        **_REBUILD,
        "swap-attention": SwapAttentionConfig(),
    },
    "swap-optimizer, all layers": {
        **_BUCKETS,
        **_SWAP,
        "recompute-layers": RecomputeLayersConfig(),
    },
}
COLOURS = {
    "weights": "#2f4b7c",
    "gradients": "#4c78a8",
    "masters": "#b5651d",
    "moments": "#e0a458",
    "activations": "#6b8e23",
    "working": "#b9b9b9",
}
LEFT, WIDE, TALL, STEP = 230, 960, 24, 36


def grouped(found: Estimate) -> dict[str, float]:
    """GiB at the peak by the figure's kinds."""
    sums = dict.fromkeys(COLOURS, 0.0)
    groups = {
        "residuals": "masters",
        "reduced gradients": "gradients",
        "DDP buckets": "gradients",
        "inputs": "working",
    }
    for kind, size in found.peak.bytes.items():
        name = kind.partition(":")[0]
        sums[groups.get(name, name)] += size / 2**30
    return sums


def draw(rows: Sequence[tuple[str, Estimate]]) -> str:
    """The figure."""
    longest = max(found.peak_bytes for _, found in rows) / 2**30
    scale = (WIDE - LEFT - 170) / longest
    height = 90 + STEP * len(rows)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDE} {height}" '
        "font-family=\"system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif\" font-size=\"14\" "
        'role="img" aria-labelledby="title">\n'
        '  <title id="title">Estimated bytes by kind at the peak of a step</title>\n'
        f'  <rect width="{WIDE}" height="{height}" fill="#ffffff"/>\n'
    )
    parts = [*_legend(), *_rows(rows, scale)]
    return head + "".join(f"  {part}\n" for part in parts) + "</svg>\n"


def _legend() -> Iterator[str]:
    x = 20
    for kind, colour in COLOURS.items():
        yield f'<rect x="{x}" y="18" width="14" height="14" fill="{colour}"/>'
        words = {"masters": "masters, residuals", "working": "working"}.get(kind, kind)
        yield f'<text x="{x + 20}" y="30">{words}</text>'
        x += 40 + 8 * len(words)


def _rows(rows: Sequence[tuple[str, Estimate]], scale: float) -> Iterator[str]:
    for number, (name, found) in enumerate(rows):
        y = 60 + STEP * number
        yield f'<text x="{LEFT - 12}" y="{y + 17}" text-anchor="end">{name}</text>'
        x = float(LEFT)
        for kind, size in grouped(found).items():
            width = size * scale
            if width:
                box = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{TALL}"'
                yield f'<rect {box} fill="{COLOURS[kind]}"/>'
            x += width
        more = f"{found.peak_bytes / 2**30:.1f} GiB"
        if found.host_bytes:
            more += f", host {found.host_bytes / 2**30:.0f}"
        yield f'<text x="{x + 8:.1f}" y="{y + 17}">{more}</text>'


def main() -> None:
    """Write the figure."""
    rows = [(name, estimate(LLAMA, Plan(features))) for name, features in PLANS.items()]
    Path(sys.argv[1]).write_text(draw(rows), encoding="utf-8")
    for name, found in rows:
        sys.stdout.write(f"{name:<28}{found.peak_bytes / 2**30:7.1f} GiB  {found.peak.name}\n")


if __name__ == "__main__":
    main()
