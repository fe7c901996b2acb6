"""The mode in which cheap calls are recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ascend_recompute._recorder import Recorder
from ascend_recompute.policy import Policy

# `tensor.data` reads and writes contents without any version counter moving.
_DATA = (Tensor.data.__get__, Tensor.data.__set__)  # type: ignore[attr-defined]


class Recording(TorchFunctionMode):
    """While it is entered, cheap calls on this thread are recorded under `label`."""

    def __init__(self, recorder: Recorder, policy: Policy, label: str) -> None:
        super().__init__()
        self._recorder = recorder
        self._operators = policy.operators | policy.random
        self._label = label

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `function`, by way of the recorder when the policy covers it."""
        if torch.compiler.is_compiling():
            return function(*args, **(kwargs or {}))
        if function in self._operators:
            return self._recorder.call(self._label, function, args, kwargs or {})
        if function in _DATA:
            self._recorder.forget(args[0])
        return function(*args, **(kwargs or {}))


def results_are_changed() -> bool:
    """Whether a function mode of the user's own is on, which backward would run without."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not isinstance(mode, (Recording, DeviceContext)) for mode in modes)
