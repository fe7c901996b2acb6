"""The slopes and the bias of ALiBi, and what calls are refused."""

import pytest
import torch

import ascend_ops
from ascend_core.errors import ConfigError
from ascend_ops import reference


def published(heads: int) -> list[float]:
    """The rule as the paper's authors state it, by recursion."""
    if heads & (heads - 1) == 0:
        ratio = 2 ** (-8 / heads)
        return [ratio ** (head + 1) for head in range(heads)]
    below = 2 ** (heads.bit_length() - 1)
    return published(below) + published(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 12, 16, 20, 40, 64, 71])
def test_ab_01_slopes_follow_the_paper_for_all_head_counts(heads: int) -> None:
    slopes = ascend_ops.alibi_slopes(heads)
    assert slopes.dtype == torch.float32
    assert slopes.shape == (heads,)
    assert slopes.tolist() == pytest.approx(published(heads), rel=1e-7)


def test_ab_01_slopes_of_twelve_heads() -> None:
    expected = [0.5**n for n in range(1, 9)] + [0.70710678, 0.35355339, 0.17677670, 0.08838835]
    assert ascend_ops.alibi_slopes(12).tolist() == pytest.approx(expected, rel=1e-7)


def test_ab_02_the_first_slope_is_not_one() -> None:
    slopes = ascend_ops.alibi_slopes(8)
    assert (slopes[0], slopes[-1]) == (0.5, 2**-8)
    assert ascend_ops.alibi_slopes(1).tolist() == [2**-8]


@pytest.mark.parametrize(("heads", "ranks"), [(8, 2), (12, 4)])
def test_ab_04_a_rank_takes_its_slice_of_the_global_slopes(heads: int, ranks: int) -> None:
    each = heads // ranks
    parts = [
        ascend_ops.alibi_slopes(heads, start=rank * each, stop=(rank + 1) * each)
        for rank in range(ranks)
    ]
    assert torch.equal(torch.cat(parts), ascend_ops.alibi_slopes(heads))
    assert not torch.equal(parts[1], parts[0])


@pytest.mark.parametrize("options", [{"heads": 0}, {"heads": 4, "start": 3, "stop": 5}])
def test_slopes_of_heads_that_are_not_there_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="there are no heads"):
        ascend_ops.alibi_slopes(**options)


def test_ab_07_the_bias_is_negative_and_counted_from_the_query() -> None:
    positions = torch.arange(4)
    bias = reference.alibi_bias(torch.tensor([0.5]), positions[2:], positions)
    assert torch.equal(bias, torch.tensor([[[[-1, -0.5, 0, -0.5], [-1.5, -1, -0.5, 0]]]]))


def test_ab_08_the_bias_of_long_sequences_keeps_its_values() -> None:
    positions = torch.arange(2048)
    bias = reference.alibi_bias(torch.tensor([2**-8]), positions[-1:], positions)
    assert len(bias.unique()) == 2048
    assert len(bias.to(torch.bfloat16).unique()) == 641


def call(**changes: torch.Tensor | float | None) -> None:
    """A call that is right, but for some changes."""
    given: dict[str, object] = {
        "q": torch.randn(2, 4, 3, 8),
        "k": torch.randn(2, 2, 5, 8),
        "v": torch.randn(2, 2, 5, 8),
        "slopes": ascend_ops.alibi_slopes(4),
    }
    ascend_ops.alibi_attention(**{**given, **changes})  # type: ignore[call-overload]


REFUSED: list[tuple[dict[str, torch.Tensor | float], str]] = [
    ({"q": torch.randn(4, 3, 8)}, "each has four dimensions"),
    ({"q": torch.randn(2, 3, 3, 8)}, "3 heads of q share 2 heads of k"),
    ({"q": torch.randn(1, 4, 3, 8)}, "all share the batch"),
    ({"k": torch.randn(2, 2, 4, 8)}, "all share the batch"),
    ({"q": torch.randn(2, 4, 3, 8).half()}, "q and k differ in dtype"),
    ({"q": torch.ones(2, 4, 3, 8, dtype=torch.int32)}, "q is torch.int32"),
    ({"q": torch.randn(2, 4, 3, 8, device="meta")}, "q and k differ in device"),
    ({"slopes": torch.ones(4).bfloat16()}, "rounded ones stay rounded"),
    ({"slopes": torch.ones(4).double()}, "slopes is torch.float64"),
    ({"slopes": torch.ones(2)}, "one for each of the 4 heads"),
    ({"slopes": torch.ones(1, 4)}, "one for each of the 4 heads"),
    ({"mask": torch.ones(2, 5)}, "it says of each key whether it counts"),
    ({"mask": torch.ones(2, 3, dtype=torch.bool)}, "it says of each key whether it counts"),
    ({"window": 0}, "window is 0"),
    ({"scale": float("nan")}, "scale is nan"),
]


@pytest.mark.parametrize(("changes", "said"), REFUSED)
def test_wrong_arguments_are_refused(changes: dict[str, torch.Tensor | float], said: str) -> None:
    call()
    with pytest.raises(ConfigError, match=said):
        call(**changes)
