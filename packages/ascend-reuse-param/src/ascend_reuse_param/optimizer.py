"""reuse-param: the FP32 master lives in the bits of its BF16 weight."""

from __future__ import annotations

import torch
from torch import optim

from ascend_core.errors import ConfigError
from ascend_core.feature import chosen_config
from ascend_core.optim import WindowedOptimizer, windowed
from ascend_core.optim.checks import check_optimizer
from ascend_reuse_param._choice import chosen_codec, chosen_kernel
from ascend_reuse_param.config import ReuseParamConfig
from ascend_reuse_param.split_home import SplitHome

__all__ = ["reuse_param"]


def reuse_param(
    optimizer: optim.Optimizer, config: ReuseParamConfig | None = None
) -> WindowedOptimizer:
    """Step FP32 masters of BF16 parameters that take 2 bytes instead of 4.

    A master is its BF16 weight and 16 bits more, and is put together only inside a step. Weights
    and state are equal, bit for bit, to those of the same optimizer on FP32 masters beside the
    weights. FP32 parameters are stepped as they are.

    Args:
        optimizer: An elementwise optimizer of torch; AdamW foremost. From now on its place is
            taken by what this returns. Its state, if it has any, is taken over at FP32.
        config: The options; the defaults when left out.

    Returns:
        The optimizer to train with, which is the handle too: `report()` says what is kept,
        `remove()` gives the moments back. `state_dict()` holds FP32 masters, on the host.

    Raises:
        ConfigError: When the optimizer or a parameter cannot be stepped so; no parameter is BF16.
        UnavailableError: When the kernels that were asked for cannot be had here.

    Example:
        >>> optimizer = reuse_param(torch.optim.AdamW(model.bfloat16().parameters()))
        >>> loss.backward()
        >>> optimizer.step()
    """
    config = chosen_config("reuse_param", ReuseParamConfig, config)
    check_optimizer("reuse_param", optimizer)
    device = _device_of(optimizer)
    codec = chosen_codec(config.kernels, config.rounding, device)
    home = SplitHome(device, codec)
    home.kernel = chosen_kernel(codec, type(optimizer), home.split)
    return windowed(
        optimizer,
        home=home,
        times=config.windows(joins=home.kernel is None or _has_other_forms(optimizer)),
        window_bytes=config.window_bytes,
        master_weights=True,
    )


def _has_other_forms(optimizer: optim.Optimizer) -> bool:
    """Whether a group is stepped in a form of torch that no kernel of ours has."""
    return any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)


def _device_of(optimizer: optim.Optimizer) -> torch.device:
    """The device of the BF16 parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.dtype == torch.bfloat16:
                return torch.device(parameter.device)
    raise ConfigError(
        "no parameter of the optimizer is BF16.",
        why="only a BF16 weight is the upper half of an FP32 master.",
        instead="convert the model with model.bfloat16() before the optimizer is built, or leave "
        "reuse_param out.",
    )
