"""Two training runs, compared bit by bit."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest
import torch
from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.testing import (
    RunRecord,
    assert_bitwise_equal,
    bits,
    bitwise_equal,
    compare_runs,
    parametrize_devices,
    random_states,
    record_run,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.complex64,
    torch.int8,
    torch.int64,
    torch.bool,
]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 6))


def make_batch(number: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(number))


def changed_at_step(what: str, step: int) -> RunRecord:
    """A run in which one value of one step was flipped by one bit."""
    run = record_run(make_model, make_batch, steps=3)
    record = run.steps[step]
    values = {name: value.clone() for name, value in getattr(record, what).items()}
    name = next(iter(values))
    bits(values[name]).view(-1)[-1].bitwise_xor_(1)
    broken = dataclasses.replace(record, **{what: values})
    return RunRecord((*run.steps[:step], broken, *run.steps[step + 1 :]), {})


@parametrize_devices()
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_run_equals_itself(
    device: torch.device, accumulate: int, autocast: torch.dtype | None
) -> None:
    def run() -> RunRecord:
        return record_run(
            make_model, make_batch, accumulate=accumulate, autocast=autocast, device=device, steps=2
        )

    first = run()
    assert_bitwise_equal(first, run())
    assert len(first.losses) == 2 * accumulate
    assert first.steps[0].weights.keys() == first.steps[0].gradients.keys()
    assert first.steps[0].buffers.keys() == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("losses", "loss 0"),
        ("gradients", "gradient 0.weight"),
        ("weights", "weight 0.weight"),
        ("buffers", "buffer 1.running_mean"),
        ("random_states", "random state"),
    ],
)
def test_one_flipped_bit_is_found_and_named(what: str, name: str) -> None:
    plain = record_run(make_model, make_batch, steps=3)
    difference = compare_runs(plain, changed_at_step(what, 1))
    assert str(difference).startswith(f"step 1, {name}")
    assert "1 of " in str(difference)


def test_a_difference_shows_the_element_and_both_values() -> None:
    plain = record_run(make_model, make_batch, steps=1)
    weights = {**plain.steps[0].weights, "3.bias": torch.full((6,), 7.0)}
    weights["3.bias"][:2] = plain.steps[0].weights["3.bias"][:2]
    changed = RunRecord((dataclasses.replace(plain.steps[0], weights=weights),), {})
    value = plain.steps[0].weights["3.bias"][2].item()
    message = f"weight 3.bias: element [2] is {value!r} against 7.0 (4 of 6 elements differ)"
    with pytest.raises(AssertionError, match=re.escape(message)):
        assert_bitwise_equal(plain, changed)


def test_a_random_number_too_many_is_found() -> None:
    def forward(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        torch.rand(1)
        return loss

    plain = record_run(lambda: nn.Linear(6, 6), make_batch, steps=1)
    changed = record_run(lambda: nn.Linear(6, 6), make_batch, steps=1, forward=forward)
    difference = compare_runs(plain, changed)
    assert difference is not None
    assert (difference.what, difference.name) == ("random state", "cpu")


def test_a_missing_gradient_and_a_missing_step_are_found() -> None:
    plain = record_run(make_model, make_batch, steps=2)
    fewer = dataclasses.replace(
        plain.steps[0],
        gradients={k: v for k, v in plain.steps[0].gradients.items() if k != "0.bias"},
    )
    missing = compare_runs(plain, RunRecord((fewer, plain.steps[1]), {}))
    assert str(missing) == "step 0, gradient 0.bias: missing in the second run"
    shorter = compare_runs(plain, RunRecord(plain.steps[:1], {}))
    assert str(shorter) == "step 1, number of steps: 2 against 1"


def test_the_handle_reports_and_is_removed_also_after_an_exception() -> None:
    class Handle:
        removed = 0

        def report(self) -> dict[str, int]:
            return {"seen": 1}

        def remove(self) -> None:
            self.removed += 1

    def fail(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        raise KeyError

    handle = Handle()
    run = record_run(make_model, make_batch, steps=1, apply=lambda model, optimizer: handle)
    assert run.report == {"seen": 1}
    assert handle.removed == 1
    with pytest.raises(KeyError):
        record_run(make_model, make_batch, apply=lambda model, optimizer: handle, forward=fail)
    assert handle.removed == 2


def test_batches_may_be_nested_and_optimizers_chosen() -> None:
    def forward(model: nn.Module, batch: dict[str, list[torch.Tensor]]) -> torch.Tensor:
        loss: torch.Tensor = model(batch["x"][0]).square().sum()
        return loss

    run = record_run(
        lambda: nn.Linear(6, 1, bias=False),
        lambda number: {"x": [make_batch(number)]},
        steps=1,
        forward=forward,
        make_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.5),
    )
    torch.manual_seed(0)
    weight = nn.Linear(6, 1, bias=False).weight.detach()
    assert torch.equal(
        run.steps[0].weights["weight"], weight - 0.5 * run.steps[0].gradients["weight"]
    )


def test_a_run_of_no_steps_is_refused() -> None:
    with pytest.raises(ConfigError, match="records nothing"):
        record_run(make_model, make_batch, steps=0)


def test_the_learning_is_real() -> None:
    run = record_run(lambda: nn.Linear(6, 6), lambda number: make_batch(0), steps=20)
    assert run.losses[-1] < run.losses[0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_see_every_bit(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, 2, dtype=dtype)
    other = tensor.clone()
    assert bitwise_equal(tensor, other)
    other.view(-1)[3] = 1
    assert not bitwise_equal(tensor, other)
    assert bits(other).count_nonzero() == 1


def test_nan_equals_itself_and_zero_differs_from_minus_zero() -> None:
    nan = torch.tensor([math.nan])
    assert bitwise_equal(nan, nan.clone())
    assert not torch.equal(nan, nan)
    assert not bitwise_equal(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_shape_and_dtype_count() -> None:
    assert not bitwise_equal(torch.zeros(2), torch.zeros(2, 1))
    assert not bitwise_equal(torch.zeros(2), torch.zeros(2, dtype=torch.int32))


def test_views_conjugates_and_sparse_tensors_compare_by_value() -> None:
    z = torch.complex(torch.randn(3), torch.randn(3))
    assert bitwise_equal(z.conj(), z.conj().resolve_conj())
    assert bitwise_equal(z.conj().imag, z.conj().imag.resolve_neg())
    matrix = torch.eye(3)
    assert bitwise_equal(matrix.to_sparse(), matrix)
    assert bitwise_equal(matrix.t(), matrix)


@parametrize_devices()
def test_the_random_state_of_a_device_moves_with_it(device: torch.device) -> None:
    before = random_states()
    torch.rand(1, device=device)
    after = random_states()
    name = next(name for name in before if torch.device(name).type == device.type)
    assert not torch.equal(before[name], after[name])
