"""swap-optimizer: the state of the optimizer lives on the host and comes in windows."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import optim

from ascend_core.errors import ConfigError
from ascend_core.feature import chosen_config
from ascend_core.optim import AttributeGradients, Gradients, WindowedOptimizer, windowed
from ascend_core.optim.checks import check_optimizer
from ascend_core.pinned import PinnedPool
from ascend_swap._stores import DiskStore, PinnedStore, Store
from ascend_swap.config import SwapOptimizerConfig
from ascend_swap.host_gradients import HostGradients
from ascend_swap.host_home import HostHome

__all__ = ["swap_optimizer"]


def swap_optimizer(
    optimizer: optim.Optimizer,
    config: SwapOptimizerConfig | None = None,
    *,
    pool: PinnedPool | None = None,
) -> WindowedOptimizer:
    """Move the state of an optimizer to the host, and step it window by window.

    Between steps the device holds no byte of moments or FP32 masters. In a step each window is
    fetched, stepped by torch's own arithmetic and sent back, while the next one comes in and the
    last one goes out. Weights are equal to those of the plain optimizer, bit for bit.

    Args:
        optimizer: An elementwise optimizer of torch; AdamW foremost. From now on its place is
            taken by what this returns.
        config: The options; the defaults when left out.
        pool: Host memory that is shared with other features, instead of a pool of its own.

    Returns:
        The optimizer to train with, which is the handle too: `report()` says what is kept where,
        `remove()` gives the state back.

    Raises:
        ConfigError: When the optimizer or a parameter cannot be stepped in windows.
        BudgetExceededError: When the state does not fit the budget. Nothing was moved.
        HostMemoryError: When the host has no room for the state. Nothing was moved.

    Example:
        >>> optimizer = swap_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        >>> loss.backward()
        >>> optimizer.step()
    """
    config = chosen_config("swap_optimizer", SwapOptimizerConfig, config)
    check_optimizer("swap_optimizer", optimizer)
    device, store = _device_of(optimizer), _store(config, pool)
    home = HostHome(device, store)
    gradients: Gradients = AttributeGradients(release=config.release_grads)
    if config.offload_gradients:
        gradients = HostGradients(device, PinnedPool() if pool is None else pool)
    return windowed(
        optimizer,
        home=home,
        times=config.times,
        window_bytes=config.window_bytes,
        master_weights=config.master_weights,
        gradients=gradients,
    )


def _device_of(optimizer: optim.Optimizer) -> torch.device:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters:
        raise ConfigError("the optimizer has no parameters.", instead="give it some first.")
    # One that is frozen is never stepped, wherever it is.
    stepped = next((p for p in parameters if p.requires_grad), parameters[0])
    return torch.device(stepped.device)


def _store(config: SwapOptimizerConfig, pool: PinnedPool | None) -> Store:
    if config.disk is not None:
        return DiskStore(Path(config.disk).expanduser(), config.host_budget_bytes)
    return PinnedStore(PinnedPool(config.host_budget_bytes) if pool is None else pool)
