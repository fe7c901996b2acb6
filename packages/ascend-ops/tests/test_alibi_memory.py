"""What ALiBi attention allocates: nothing of Sq x Skv, on any backend that a CPU has."""

from types import ModuleType

import pytest
import torch

import ascend_ops
from ascend_core.memory import measure_peak
from ascend_ops._kernels.cpu import alibi_attention as cpu
from ascend_ops._kernels.eager import alibi_attention as eager

HEADS, TOKENS, SIZE = 4, 2048, 64
RESULT = HEADS * TOKENS * SIZE * 4  # bytes of out, and of each gradient
ROWS = HEADS * TOKENS * 4  # of lse
SQUARE = TOKENS * TOKENS * 4  # what must not be there, even for one head


def peaks(backend: str) -> tuple[int, int]:
    """The most bytes of a forward and of a backward, each with its results."""
    q, k, v = (torch.randn(1, HEADS, TOKENS, SIZE, requires_grad=True) for _ in range(3))
    grad, slopes = torch.randn(q.shape), ascend_ops.alibi_slopes(HEADS)
    with measure_peak("cpu") as forward:
        out = ascend_ops.alibi_attention(q, k, v, slopes, backend=backend)
    with measure_peak("cpu") as backward:
        torch.autograd.grad(out, (q, k, v), grad)
    return forward.peak_bytes, backward.peak_bytes


def test_eager_allocates_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    block = 1 << 20
    monkeypatch.setattr(eager, "_BLOCK_BYTES", block)
    forward, backward = peaks("eager")
    # At most four blocks of scores, with int64 distances and a mask of one head in [rows, keys].
    blocks = 4 * block + 3 * 8 * block // (4 * HEADS)
    block_rows = 6 * RESULT * (block // (HEADS * TOKENS * 4)) // TOKENS
    small = 1 << 18
    assert RESULT + ROWS <= forward <= RESULT + ROWS + blocks + block_rows + small
    # k and v's gradients are summed beside, and a block's part of one of them.
    sums = 3 * RESULT
    assert 3 * RESULT <= backward <= 3 * RESULT + ROWS + sums + blocks + block_rows + small
    assert max(forward, backward) < SQUARE


def test_cpu_allocates_blocks_of_rows_and_one_gradient_of_keys_for_each_thread() -> None:
    forward, backward = peaks("cpu")
    share = min(1, torch.get_num_threads() / HEADS)
    # A block of rows in reverse, its result, that in order; torch's own blocks of scores.
    rows = share * RESULT * cpu._ROWS / TOKENS
    scratch = (torch.get_num_threads() << 18) + (1 << 17)
    bounds = 12 * share * ROWS  # positions and bounds of rows, in FP64, and the bias
    assert RESULT + ROWS <= forward <= RESULT + ROWS + 3 * rows + scratch + bounds
    # q, grad, out in reverse, the gradient of q twice; the gradients of k and v of a block.
    of_block = 5 * rows + 2 * share * RESULT
    assert 3 * RESULT <= backward <= 3 * RESULT + of_block + scratch + bounds
    assert max(forward, backward) < SQUARE


@pytest.mark.parametrize("module", [cpu, eager])
def test_ab_12_kernels_hold_nothing(module: ModuleType) -> None:
    kernel = module.load()
    peak_call = [torch.randn(1, 2, 64, 8) for _ in range(3)]
    slopes = ascend_ops.alibi_slopes(2)
    with measure_peak("cpu") as memory:
        name = module.__name__.split(".")[-2]
        out = ascend_ops.alibi_attention(*peak_call, slopes, backend=name)
        del out
    assert memory.held_bytes == 0
    assert not vars(kernel)
