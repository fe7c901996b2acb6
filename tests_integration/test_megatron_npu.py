"""The real megatron-core on a simulated NPU: equal to the CPU, and wrong where a wait is missing.

One process (two for two ranks) trains all configurations; a test reads what came of one of them.
Losses and norms of gradients are compared to the bit. Nothing here was run on a real NPU.
"""

from __future__ import annotations

import functools
import importlib.util

import pytest

from tests_integration.megatron_npu import launch, losses
from tests_integration.megatron_npu.configurations import (
    BY_WORLD,
    DROPOUT,
    OFFLOAD,
    OPS_1,
    OPS_2,
    SWAP_1,
    SWAP_2,
    TWINS,
    TWINS_2,
    WORLD_1,
    WORLD_2,
    reference,
)
from tests_integration.megatron_npu.launch import Outcome

if importlib.util.find_spec("torch_npu") is None:
    pytest.skip("needs torch_npu: python3 -m nox -s npu", allow_module_level=True)

pytestmark = pytest.mark.timeout(900)  # the first test waits for all that is trained

# `lazy` lets copies wait as long as they may; `early` shows where one comes too early.
EARLY = {name for name in TWINS if "no wait before the copy" in name}


@functools.cache
def trained(world: int) -> dict[str, Outcome]:
    return launch.run(list(BY_WORLD[world]), world=world, device="lazy")


@functools.cache
def trained_early() -> dict[str, Outcome]:
    return launch.run(sorted(EARLY), world=1, device="early")


def assert_same(ours: Outcome, expected: Outcome) -> None:
    """As many steps as both have are equal to the bit."""
    assert ours.error is None, ours.error
    steps = min(len(ours.losses), len(expected.losses))
    assert steps >= 3
    assert ours.means()[:steps] == expected.means()[:steps]
    assert ours.losses[:steps] == expected.losses[:steps]
    assert ours.norms[:steps] == expected.norms[:steps]


def assert_wrong(ours: Outcome, expected: Outcome) -> None:
    """It was trained to the end, and not to the same losses."""
    assert ours.error is None, ours.error
    assert len(ours.losses) == len(expected.losses) == 4
    assert ours.losses != expected.losses


@pytest.mark.parametrize("name", [*WORLD_1, *SWAP_1])
def test_one_rank_trains_as_on_the_cpu(name: str) -> None:
    assert_same(trained(1)[name], losses.kept(1)[reference(name, 1)])


@pytest.mark.parametrize("name", [*WORLD_2, *SWAP_2])
def test_two_ranks_train_as_on_the_cpu(name: str) -> None:
    assert_same(trained(2)[name], losses.kept(2)[reference(name, 2)])


@pytest.mark.parametrize("name", [name for name in DROPOUT if name != "dropout"])
def test_recompute_draws_the_same_random_numbers(name: str) -> None:
    assert_same(trained(1)[name], trained(1)["dropout"])
    assert trained(1)["dropout"].losses[0] != losses.kept(1)["fp32"].losses[0]


# Fused operators ---------------------------------------------------------------------------------

# Of each layer, sequence and step, once. A norm's forward is called again for its backward.
CALLS = {
    "npu::npu_swiglu": 1,
    "npu::npu_swiglu_backward": 1,
    "npu::npu_rms_norm_backward": 2,
    "npu::npu_fusion_attention_v2": 1,
    "npu::npu_fusion_attention_grad_v2": 1,
}


@pytest.mark.parametrize(
    ("world", "name"), [*((1, name) for name in OPS_1), *((2, name) for name in OPS_2)]
)
def test_fused_operators_are_those_of_the_npu(world: int, name: str) -> None:
    ours = trained(world)[name]
    assert ours.error is None, ours.error
    steps, sequences, layers = 3, 4, 2 if "pp2" in name else 4
    for report in ours.reports:
        for operator, times in CALLS.items():
            called = report["calls"].get(operator, 0)
            wanted = steps * sequences * layers * times
            if "fusion" in operator and "alibi" not in name:
                wanted = 0
            # There is one norm more after the last layer.
            after = steps * sequences if "rms_norm" in operator else 0
            assert called in (wanted, wanted + after), report["calls"]


@pytest.mark.parametrize("name", ["ops", "ops, bf16"])
def test_fused_operators_train_near_the_plain_run(name: str) -> None:
    ours, plain = trained(1)[name].means(), losses.kept(1)[reference(name, 1)].means()
    # See tests_integration/test_ops_megatron.py for what differs.
    bound = 2**-7 if "bf16" in name else 1e-5
    assert ours == pytest.approx(plain[:3], rel=bound)


# Races -------------------------------------------------------------------------------------------


def expected(name: str) -> Outcome:
    """What a configuration with offload trains to when nothing is missing."""
    return trained(1)["offload of norms, of nothing"] if "norms" in name else losses.kept(1)["fp32"]


@pytest.mark.parametrize("name", [name for name in OFFLOAD if "unmodified" in name])
def test_unmodified_offload_goes_wrong(name: str) -> None:
    assert_wrong(trained(1)[name], expected(name))
    assert expected(name).means()[1] == 4.425479
    assert abs(trained(1)[name].means()[1] - 4.425479) > 1e-3


@pytest.mark.parametrize("name", [name for name in OFFLOAD if "with the wait" in name])
def test_offload_is_right_with_the_wait_that_it_lacks(name: str) -> None:
    assert_same(trained(1)[name], expected(name))


@pytest.mark.parametrize("name", [name for name in TWINS if name not in EARLY])
def test_the_loss_of_a_synchronisation_is_noticed(name: str) -> None:
    assert_wrong(trained(1)[name], expected(name))


@pytest.mark.parametrize("name", sorted(EARLY))
def test_a_copy_that_comes_too_early_is_wrong(name: str) -> None:
    assert_wrong(trained_early()[name], expected(name))


@pytest.mark.parametrize("name", TWINS_2)
def test_the_loss_of_a_wait_for_another_rank_is_noticed(name: str) -> None:
    assert_wrong(trained(2)[name], losses.kept(2)[reference(name, 2)])
