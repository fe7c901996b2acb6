"""Which backend a call would be computed by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ascend_core.errors import ConfigError
from ascend_ops._backends import choose
from ascend_ops.functional import _alibi, _rms_norm, _rotary, _swiglu

__all__ = ["backend_of"]

# What a function hands to the kernels, by the function's name, after its checks.
_CALLS: Mapping[str, tuple[str, Callable[..., tuple[Any, ...]]]] = MappingProxyType(
    {
        "alibi_attention": ("alibi_attention", _alibi.call_of_alibi_attention),
        "rms_norm": ("rms_norm", _rms_norm.call_of_rms_norm),
        "rotary": ("rotary", _rotary.call_of_rotary),
        "swiglu": ("swiglu", _swiglu.call_of_swiglu),
        "swiglu_pair": ("swiglu", _swiglu.call_of_swiglu_pair),
    }
)


def backend_of(function: str, *args: Any, backend: str | None = None, **kwargs: Any) -> str:
    """Say which backend would compute a call, without computing it.

    Args:
        function: Its name in `ascend_ops`, e.g. `"swiglu"`.
        args: What it would be given.
        backend: As it would be given.
        kwargs: What it would be given by name.

    Returns:
        `"eager"` (torch's own operators), `"cpu"`, `"triton"` or `"npu"`.

    Raises:
        ConfigError: When there is no such function, or the call is one that it refuses.
        UnavailableError: When `backend` cannot be used on this machine.

    Example:
        >>> ascend_ops.backend_of("swiglu", x)
        'cpu'
    """
    if function not in _CALLS:
        raise ConfigError(
            f"ascend_ops has no operator {function!r}.",
            instead=f"name one of {', '.join(_CALLS)}.",
        )
    operator, call_of = _CALLS[function]
    tensor, *call = call_of(*args, **kwargs)
    return choose(operator, backend, tensor, *call)[0]
