"""MLPs that are gated by silu: `down(silu(gate(x)) * up(x))`."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ascend_core.scope import Call, owners
from ascend_ops import reference
from ascend_ops._fusing._double import DTYPES, StandIn, agree, double_of, numbers, run
from ascend_ops._fusing._fusion import Fusion, is_plain
from ascend_ops._fusing._settings import Settings, is_watched
from ascend_ops.functional import backend_of, swiglu, swiglu_pair

__all__ = ["fuse_mlp", "looks_gated"]


class _Roles(NamedTuple):
    """The names of the linear layers of an MLP.

    Attributes:
        first: Those that are given x, in the order in which they are called: two, or one that
            makes gate and up at once, gate first.
        gate: That of `first` which makes the gate.
        down: The one behind the product.
    """

    first: tuple[str, ...]
    gate: str
    down: str


def looks_gated(module: nn.Module) -> bool:
    """Whether its linear layers have the sizes of a gated MLP's."""
    sizes = [(child.in_features, child.out_features) for child in _linears(module).values()]
    if len(sizes) == 2:
        return any(a[1] == 2 * b[0] for a, b in (sizes, sizes[::-1]))
    if len(sizes) != 3:
        return False
    pairs = ((0, 1, 2), (0, 2, 1), (1, 2, 0))
    return any(sizes[a] == sizes[b] and sizes[a][1] == sizes[c][0] for a, b, c in pairs)


def fuse_mlp(module: nn.Module, backend: str | None) -> Fusion | str:
    """How `swiglu` or `swiglu_pair` computes an MLP, or why neither does."""
    other = _other(module)
    if other is not None:
        return other
    try:
        found = {
            _roles(module, dtype, training=training)
            for dtype in DTYPES
            for training in (True, False)
        }
    except Exception as error:  # whatever the forward of somebody else's class may raise
        return f"it does not run on a tensor alone: {type(error).__name__}: {error}"
    roles = found.pop()
    if found or roles is None:
        return "it computes something else than down(silu(gate(x)) * up(x))"
    weight = next(module.parameters(), None)
    floating = weight is not None and weight.is_floating_point()
    dtype = weight.dtype if weight is not None and floating else torch.float32
    width = _linears(module)[roles.first[0]].out_features
    made = [numbers(3, width, like=weight, dtype=dtype, seed=n) for n in range(len(roles.first))]
    operator = "swiglu" if len(made) == 1 else "swiglu_pair"
    return Fusion(
        operator,
        _form(roles),
        backend_of(operator, *made, backend=backend),
        functools.partial(_compute, roles=roles, backend=backend),
        Settings(module, {name: part for name, part in _parts(module).items() if name}),
    )


def _form(roles: _Roles) -> str:
    if len(roles.first) == 1:
        return f"silu(a) * b for the halves a, b of {roles.gate}(x)"
    (up,) = {*roles.first} - {roles.gate}
    return f"silu({roles.gate}(x)) * {up}(x)"


def _other(module: nn.Module) -> str | None:
    """What speaks against the operator beside the linear layers; None where nothing does."""
    for name, part in _parts(module).items():
        tensors = {**part._parameters, **part._buffers}  # zeros now may be something else later
        if any(tensor is not None for tensor in tensors.values()):
            return f"it has tensors of its own, {', '.join(tensors)}, beside its linear layers'"
        if name and (is_watched(part) or owners(part)):
            return f"somebody watches the calls of {name}, which there would be no more"
    return None


def _parts(module: nn.Module) -> dict[str, nn.Module]:
    """The module, by no name, and what is inside it beside its linear layers."""
    linears = _linears(module)
    named = module.named_modules()
    return {name: part for name, part in named if name.partition(".")[0] not in linears}


def _compute(
    module: nn.Module,
    own: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    roles: _Roles,
    backend: str | None,
) -> Any:
    """Compute the MLP by the operator. Its linear layers are called as modules, hooks and all."""
    if len(args) != 1 or kwargs:
        return own(*args, **kwargs)
    made = {name: getattr(module, name)(args[0]) for name in roles.first}
    return getattr(module, roles.down)(_product(roles, made, backend))


def _product(roles: _Roles, made: dict[str, Tensor], backend: str | None) -> Tensor:
    gate = made.pop(roles.gate)
    up = made.popitem()[1] if made else None
    if up is None:
        if is_plain(gate):
            return swiglu(gate, backend=backend)
        gate, up = gate.chunk(2, -1)
    elif is_plain(gate, up) and gate.dtype == up.dtype and gate.shape == up.shape:
        return swiglu_pair(gate, up, backend=backend)
    return F.silu(gate) * up


def _linears(module: nn.Module) -> dict[str, Any]:
    """The children that say their sizes as linear layers do, by name."""
    return {
        name: child
        for name, child in module.named_children()
        if isinstance(getattr(child, "in_features", None), int)
        and isinstance(getattr(child, "out_features", None), int)
    }


def _roles(module: nn.Module, dtype: torch.dtype, *, training: bool) -> _Roles | None:
    """What each linear layer is for, by one run of the forward; None when it is no such MLP."""
    linears = _linears(module)
    like = next(module.parameters(), None)
    stand_ins = {
        name: StandIn(numbers(3, 2, linear.out_features, like=like, dtype=dtype, seed=seed))
        for seed, (name, linear) in enumerate(linears.items())
    }
    called: list[str] = []
    for name, stand_in in stand_ins.items():
        stand_in.register_forward_hook(functools.partial(_note, called, name))
    width = next(iter(linears.values())).in_features
    x = numbers(3, 2, width, like=like, dtype=dtype, seed=len(linears))
    y = run(double_of(module, training=training, children=stand_ins), x)
    if sorted(called) != sorted(linears):  # each of them once
        return None
    *first, down = called
    if not all(_is(stand_ins[name].given[0], x) for name in first):
        return None
    if not _is(y, stand_ins[down].result):
        return None
    gate = _gate(stand_ins[down].given[0], {name: stand_ins[name].result for name in first})
    return None if gate is None else _Roles(tuple(first), gate, down)


def _note(called: list[str], name: str, *_: object) -> None:
    called.append(name)


def _is(one: Any, other: Tensor) -> bool:
    return isinstance(one, Tensor) and one.dtype == other.dtype and torch.equal(one, other)


def _gate(product: Tensor, made: dict[str, Tensor]) -> str | None:
    """Which of the layers makes the gate of a product; None when it is none of theirs."""
    if len(made) == 1:
        (name,) = made
        return name if agree(product, reference.swiglu(made[name])) else None
    (one, a), (other, b) = made.items()
    if a.shape != b.shape:
        return None
    for gate, formula in ((one, (a, b)), (other, (b, a))):
        if agree(product, reference.swiglu_pair(*formula)):
            return gate
    return None
