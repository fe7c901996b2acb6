"""The mode in which cheap calls are recorded."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from ascend_core.saved import Region
from ascend_recompute._recorder import RebuildKeeper, Recorder

# `tensor.data` reads and writes contents without any version counter moving.
_DATA = frozenset((Tensor.data.__get__, Tensor.data.__set__))  # type: ignore[attr-defined]


class Recording(TorchFunctionMode):
    """A context manager in which cheap calls on this thread are recorded under `label`.

    Nothing is recorded where no tensor is saved, nor under a function mode of the user's own.
    """

    def __init__(self, keeper: RebuildKeeper, label: str) -> None:
        super().__init__()
        self._keeper = keeper
        self._label = label
        self._region = Region(keeper)
        self._recorder: Recorder | None = None

    def __enter__(self) -> Recording:
        frame = self._region.__enter__().frame
        try:
            if frame is not None and not _results_are_changed():
                recorder: Any = frame.session(self._keeper)
                super().__enter__()  # type: ignore[no-untyped-call]
                self._recorder = recorder
        except BaseException as error:  # an interrupt: the region must not stay open
            self._region.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._recorder is not None:
            self._recorder = None
            super().__exit__(kind, error, traceback)  # type: ignore[no-untyped-call]
        self._region.__exit__(kind, error, traceback)

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call `function`, by way of the recorder when the policy covers it."""
        kwargs = kwargs or {}
        recorder = self._recorder
        if recorder is None or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if function in self._keeper.operators:
            return recorder.call(self._label, function, args, kwargs)
        if function in _DATA:
            recorder.forget(args[0])
        return function(*args, **kwargs)


def _results_are_changed() -> bool:
    """Whether a function mode of the user's own is on, which backward would run without."""
    if torch._C._len_torch_function_stack() == 0:
        return False
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    return any(not isinstance(mode, (Recording, DeviceContext)) for mode in modes)
