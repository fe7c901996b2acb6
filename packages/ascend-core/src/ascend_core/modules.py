"""Finding the modules that a verb works on."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn

from ascend_core.errors import ConfigError
from ascend_core.stack import Named

__all__ = ["find_attentions", "find_mlps", "find_norms", "is_called", "named"]

_MLP_NAMES = ("mlp", "ffn", "feedforward", "feed_forward")
_ACTIVATIONS = (
    nn.GELU, nn.SiLU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Hardswish, nn.Hardtanh, nn.GLU, nn.PReLU,
)  # fmt: skip

# Classes of normalisation by the names that libraries give them; BatchNorm and its like count what
# they see, so they may not run twice.
_NORMS = ("layernorm", "rmsnorm")

# Attribute names of attention in torch, megatron-core, Hugging Face and what follows them.
_ATTENTIONS = ("self_attention", "self_attn", "attention", "attn")


def named(model: nn.Module, wanted: Sequence[str | type[nn.Module]]) -> Named:
    """The modules of these names and types, by qualified name, in the order of the model.

    A container without a call of its own (`ModuleList`, `ModuleDict`) is passed over.

    Raises:
        ConfigError: When a name or type matches nothing, or nothing but such containers.
    """
    matches: dict[str | type[nn.Module], Named] = {one: {} for one in wanted}
    for name, module in model.named_modules():
        for one, found in matches.items():
            if _matches(one, name, module):
                found[name] = module
    for one, found in matches.items():
        if not found:
            raise _nothing_matches(model, one)
        if not any(map(is_called, found.values())):
            raise _never_called(*next(iter(found.items())))
    taken = {name for found in matches.values() for name in found if is_called(found[name])}
    return {name: module for name, module in model.named_modules() if name in taken}


def is_called(module: nn.Module) -> bool:
    """Whether the module can be called: it is no container without a forward (`ModuleList`)."""
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return True
    return getattr(module.forward, "__func__", None) is not nn.Module.forward


def _matches(wanted: str | type[nn.Module], name: str, module: nn.Module) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return wanted in (name, name.rpartition(".")[2]) and name != ""


def find_mlps(model: nn.Module) -> Named:
    """The outermost modules that look like an MLP.

    Raises:
        ConfigError: When there is none.
    """
    found: Named = {}
    for name, module in model.named_modules():
        inside_another = any(outer == "" or name.startswith(f"{outer}.") for outer in found)
        if not inside_another and _looks_like_mlp(name, module):
            found[name] = module
    if not found:
        raise ConfigError(
            f"no module of this {type(model).__name__} looks like an MLP.",
            why="none is called mlp or feed_forward, and none is made of linear layers with an "
            "activation between them.",
            instead=f"name them, as in modules=('{_example(model)}',), or pass their class.",
        )
    return found


def find_norms(model: nn.Module) -> Named:
    """The modules that normalise over the last dimensions.

    Raises:
        ConfigError: When there is none.
    """
    found = {name: module for name, module in model.named_modules() if _is_norm(module)}
    if not found:
        raise ConfigError(
            f"no module of this {type(model).__name__} looks like a norm.",
            why="no class of them is called LayerNorm or RMSNorm, or like one.",
            instead=f"name them, as in modules=('{_example(model)}',), or pass their class.",
        )
    return found


def find_attentions(model: nn.Module) -> Named:
    """The outermost modules that are called as attention is, or are torch's own.

    Raises:
        ConfigError: When there is none.
    """
    found: Named = {}
    for name, module in model.named_modules():
        inside_another = any(name.startswith(f"{outer}.") for outer in found)
        if not inside_another and _is_attention(name, module):
            found[name] = module
    if not found:
        raise ConfigError(
            f"no module of this {type(model).__name__} looks like attention.",
            why=f"none is called {', '.join(_ATTENTIONS[:-1])} or {_ATTENTIONS[-1]}.",
            instead=f"give their names, such as '{_example(model)}', or their class.",
        )
    return found


def _is_attention(name: str, module: nn.Module) -> bool:
    fits = name.rpartition(".")[2] in _ATTENTIONS and is_called(module)
    return fits or isinstance(module, nn.MultiheadAttention)


def _is_norm(module: nn.Module) -> bool:
    kind = type(module).__name__.lower()
    return any(known in kind for known in _NORMS) and not any(True for _ in module.children())


def _looks_like_mlp(name: str, module: nn.Module) -> bool:
    if not any(True for _ in module.parameters()) or isinstance(module, nn.ModuleList):
        return False
    linears = sum(_is_linear(child) for child in module.children())
    names = (type(module).__name__.lower(), name.rpartition(".")[2].lower())
    if any(known in candidate for known in _MLP_NAMES for candidate in names):
        return linears > 0 or isinstance(module, nn.Sequential)
    has_activation = any(isinstance(child, _ACTIVATIONS) for child in module.children())
    return (linears >= 2 and has_activation) or isinstance(module, nn.TransformerEncoderLayer)


def _is_linear(module: nn.Module) -> bool:
    """Whether it is a linear layer; that of a library of its own may not derive from torch's."""
    if isinstance(module, nn.Linear):
        return True
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and not isinstance(module, nn.Embedding)


def _nothing_matches(model: nn.Module, wanted: str | type[nn.Module]) -> ConfigError:
    if isinstance(wanted, type):
        kinds = sorted({type(module).__name__ for module in model.modules()})
        return ConfigError(
            f"no module of this {type(model).__name__} is a {wanted.__name__}.",
            why=f"its modules are of the types {_some(kinds)}.",
            instead="pass one of those types, or a module's name.",
        )
    names = [name for name, _ in model.named_modules() if name]
    attributes = sorted({name.rpartition(".")[2] for name in names})
    near = difflib.get_close_matches(wanted, [*names, *attributes], n=1)
    return ConfigError(
        f"this {type(model).__name__} has no module called {wanted!r}.",
        why=f"names are matched exactly, and the attribute names are {_some(attributes)}.",
        instead=f"did you mean {near[0]!r}?" if near else "use a name of model.named_modules().",
    )


def _never_called(name: str, module: nn.Module) -> ConfigError:
    return ConfigError(
        f"{name!r} is a {type(module).__name__}, which is never called itself.",
        why="it only holds modules, and they are called one by one.",
        instead="name the modules that it holds, or give their class.",
    )


def _example(model: nn.Module) -> str:
    names = [name for name, _ in model.named_modules() if name]
    return names[0] if names else "mlp"


def _some(names: Sequence[str], most: int = 40) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")
