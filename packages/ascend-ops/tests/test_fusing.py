"""Which modules an operator is found to compute, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from ascend_ops import FusedOpsConfig, apply_fused_ops

WIDTH, INNER = 16, 24


class LlamaRMSNorm(nn.Module):
    """Rounds to the dtype before it multiplies by the weight."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.variance_epsilon = eps

    def scaled(self, normed: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight * normed.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.scaled(normed, x.dtype)


class GemmaRMSNorm(LlamaRMSNorm):
    """Multiplies by 1 + weight in FP32, and has a weight of zeros at first."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.weight)

    def scaled(self, normed: Tensor, dtype: torch.dtype) -> Tensor:
        return (normed * (1.0 + self.weight.float())).to(dtype)


class T5LayerNorm(LlamaRMSNorm):
    """Is no LayerNorm, for all its name."""


class ConstantRMSNorm(LlamaRMSNorm):
    """Says nowhere what it adds."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        del self.variance_epsilon
        self._added = eps

    def __getattr__(self, name: str) -> Tensor | float:
        return self._added if name == "variance_epsilon" else super().__getattr__(name)


class SquaredRMSNorm(LlamaRMSNorm):
    """Equals RMSNorm for as long as the weight is all ones."""

    def scaled(self, normed: Tensor, dtype: torch.dtype) -> Tensor:
        return self.weight.square() * normed.to(dtype)


class OtherEpsilonRMSNorm(LlamaRMSNorm):
    """Does not add what it says."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (WIDTH,), self.weight, 1e-5)


class DroppingRMSNorm(LlamaRMSNorm):
    """Does something else in training."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.5, self.training)


class ResidualRMSNorm(LlamaRMSNorm):
    def forward(self, x: Tensor, residual: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + residual)


class HalfRMSNorm(LlamaRMSNorm):
    """Normalises the first half alone."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((super().forward(x)[..., : WIDTH // 2], x[..., WIDTH // 2 :]), -1)


class LlamaMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class LettersMLP(nn.Module):
    """Names its layers by letters, calls the one that is not gated first, and has biases."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.w2 = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        up = self.w3(x)
        out: Tensor = self.w2(up * F.silu(self.w1(x)))
        return out


class SquareMLP(nn.Module):
    """All its layers are of one size: only a run can tell which is which."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.a, self.b = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.c(self.a(x) * F.silu(self.b(x)))
        return out


class PackedMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(WIDTH, 2 * INNER, bias=False)
        self.down_proj = nn.Linear(INNER, WIDTH, bias=False)
        self.activation_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        out: Tensor = self.down_proj(up * self.activation_fn(gate))
        return out


class GeluMLP(LlamaMLP):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.GELU()  # type: ignore[assignment]


class ClampedMLP(LlamaMLP):
    """Differs for large numbers alone."""

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x).clamp(-7, 7)
        out: Tensor = self.down_proj(self.act_fn(gate) * up)
        return out


class ResidualMLP(LlamaMLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class DroppingMLP(LlamaMLP):
    """Does something else in training."""

    def forward(self, x: Tensor) -> Tensor:
        product = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(F.dropout(product, 0.5, self.training))
        return out


class ShiftedMLP(LlamaMLP):
    """Has a shift that is zero at first."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(INNER))

    def forward(self, x: Tensor) -> Tensor:
        product = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        out: Tensor = self.down_proj(product + self.shift.to(x.dtype))
        return out


class ReadingMLP(LlamaMLP):
    """Reads a weight, and does not call the layer."""

    def forward(self, x: Tensor) -> Tensor:
        product = F.silu(F.linear(x, self.gate_proj.weight)) * self.up_proj(x)
        out: Tensor = self.down_proj(product)
        return out


class WideMLP(LlamaMLP):
    """Makes the product in FP32."""

    def forward(self, x: Tensor) -> Tensor:
        product = F.silu(self.gate_proj(x).float()) * self.up_proj(x).float()
        out: Tensor = self.down_proj(product)
        return out


TAKEN: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "torch": (lambda: nn.RMSNorm(WIDTH), "rms_norm by eager: norm(x) * weight"),
    "no weight": (
        lambda: nn.RMSNorm(WIDTH, 1e-5, elementwise_affine=False),
        "rms_norm by eager: norm(x)",
    ),
    "llama": (LlamaRMSNorm, "rms_norm by eager: norm(x) * weight"),
    "gemma": (GemmaRMSNorm, "rms_norm by eager: norm(x) * (1 + weight)"),
    "t5": (T5LayerNorm, "rms_norm by eager: norm(x) * weight"),
    "1e-6": (lambda: ConstantRMSNorm(1e-6), "rms_norm by eager: norm(x) * weight"),
    "1e-5": (lambda: ConstantRMSNorm(1e-5), "rms_norm by eager: norm(x) * weight"),
    "mlp": (LlamaMLP, "swiglu_pair by eager: silu(gate_proj(x)) * up_proj(x)"),
    "letters": (LettersMLP, "swiglu_pair by eager: silu(w1(x)) * w3(x)"),
    "square": (SquareMLP, "swiglu_pair by eager: silu(b(x)) * a(x)"),
    "packed": (
        PackedMLP,
        "swiglu by eager: silu(a) * b for the halves a, b of gate_up_proj(x)",
    ),
}
LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "layer norm": (lambda: nn.LayerNorm(WIDTH, bias=False), "something else than RMSNorm"),
    "squared": (SquaredRMSNorm, "something else than RMSNorm"),
    "epsilon": (OtherEpsilonRMSNorm, "something else than RMSNorm"),
    "dropping": (DroppingRMSNorm, "something else than RMSNorm"),
    "half": (HalfRMSNorm, "something else than RMSNorm"),
    "residual": (ResidualRMSNorm, "does not run on a tensor alone: TypeError"),
    "gelu": (GeluMLP, "something else than down"),
    "clamped": (ClampedMLP, "something else than down"),
    "residual mlp": (ResidualMLP, "something else than down"),
    "dropping mlp": (DroppingMLP, "something else than down"),
    "wide": (WideMLP, "something else than down"),
    "shifted": (ShiftedMLP, "tensors of its own, shift"),
    "reading": (ReadingMLP, "does not run on a tensor alone: AttributeError"),
}
by_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def with_weights(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    module = make()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    return module.to(dtype)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = module(x)
    grad = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
    return [y, *torch.autograd.grad(y, [x, *module.parameters()], grad)]


@by_dtype
@pytest.mark.parametrize("kind", TAKEN)
def test_what_an_operator_computes_is_taken_and_stays_what_it_was(
    kind: str, dtype: torch.dtype
) -> None:
    make, form = TAKEN[kind]
    module = with_weights(make, dtype)
    x = torch.randn(5, WIDTH, dtype=dtype, requires_grad=True)
    before = gradients(module, x)
    handle = apply_fused_ops(module, FusedOpsConfig(backend="eager"))
    assert handle.report()["fused"] == {"": form}
    eps = torch.finfo(dtype).eps
    for ours, theirs in zip(gradients(module, x), before, strict=True):
        assert ours.dtype == theirs.dtype
        size = theirs.abs().max().item()
        torch.testing.assert_close(ours, theirs, rtol=16 * eps, atol=4 * eps * size)
    handle.remove()
    assert all(map(torch.equal, gradients(module, x), before))


@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("kind", LEFT)
def test_what_no_operator_computes_is_left_alone(kind: str, fresh: bool) -> None:
    make, reason = LEFT[kind]
    module = make() if fresh else with_weights(make, torch.float32)
    model = nn.ModuleList((nn.RMSNorm(WIDTH), module))
    own = type(module)
    report = apply_fused_ops(model).report()
    assert list(report["fused"]) == ["0"]
    assert list(report["left"]) == ["1"] and reason in report["left"]["1"]
    assert type(module) is own


@pytest.mark.parametrize("kind", [*TAKEN, *LEFT])
def test_finding_out_leaves_no_trace(kind: str) -> None:
    module = with_weights((TAKEN | LEFT)[kind][0], torch.float32)
    calls: list[str] = []
    for name, part in module.named_modules():
        part.register_forward_hook(lambda *_, name=name: calls.append(name))
        part.register_forward_pre_hook(lambda *_, name=name: calls.append(name))
    attributes = {name: {**vars(part)} for name, part in module.named_modules()}
    versions = [parameter._version for parameter in module.parameters()]
    random = torch.get_rng_state()
    apply_fused_ops(nn.ModuleList((nn.RMSNorm(WIDTH), module))).remove()
    assert not calls
    assert torch.equal(torch.get_rng_state(), random)
    assert [parameter._version for parameter in module.parameters()] == versions
    for name, part in module.named_modules():
        assert vars(part).keys() == attributes[name].keys()
        assert all(vars(part)[key] is value for key, value in attributes[name].items())


@by_dtype
def test_a_norm_rounds_once_where_a_model_rounds_twice(dtype: torch.dtype) -> None:
    """The numerics that the documentation states: ours is the nearer to the truth."""
    norm = with_weights(LlamaRMSNorm, dtype)
    x = torch.randn(1000, WIDTH, dtype=dtype)
    truth = with_weights(LlamaRMSNorm, dtype).double()
    wide = x.double()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    exact = truth.weight * normed
    theirs = norm(x)
    apply_fused_ops(norm)
    ours = norm(x)
    half = torch.finfo(dtype).eps / 2
    single = 4 * torch.finfo(torch.float32).eps
    assert ((ours.double() - exact).abs() <= (half + single) * exact.abs()).all()
    if dtype != torch.float32:
        assert ((theirs.double() - exact).abs() > half * exact.abs()).any()
        assert not torch.equal(ours, theirs)


def test_hooks_of_a_module_and_of_its_layers_fire_as_before() -> None:
    module = nn.Sequential(LlamaRMSNorm(), LlamaMLP())
    calls: list[str] = []
    names = ["0", "1", "1.gate_proj", "1.up_proj", "1.down_proj"]
    for name in names:
        part = module.get_submodule(name)
        part.register_forward_pre_hook(lambda *_, name=name: calls.append(f"before {name}"))
        part.register_forward_hook(lambda *_, name=name: calls.append(f"after {name}"))
        part.register_full_backward_hook(lambda *_, name=name: calls.append(f"backward {name}"))
    x = torch.randn(3, WIDTH, requires_grad=True)
    module(x).sum().backward()
    before = calls.copy()
    calls.clear()
    apply_fused_ops(module)
    module(x).sum().backward()
    assert calls == before and len(calls) == 3 * len(names)


def test_an_activation_whose_calls_are_watched_stays() -> None:
    module = nn.Sequential(LlamaMLP(), LlamaMLP())
    seen: list[object] = []
    module[0].act_fn.register_forward_hook(lambda *_: seen.append(1))
    report = apply_fused_ops(module).report()
    assert "watches the calls of act_fn" in report["left"]["0"]
    module(torch.randn(3, WIDTH))
    assert seen == [1]


@pytest.mark.parametrize("kind", TAKEN)
def test_weights_may_be_on_meta(kind: str) -> None:
    with torch.device("meta"):
        module = TAKEN[kind][0]()
    config = FusedOpsConfig(backend="eager")
    assert apply_fused_ops(module, config).report()["fused"] == {"": TAKEN[kind][1]}
    module.to_empty(device="cpu")
    for parameter in module.parameters():
        nn.init.ones_(parameter)
    assert module(torch.randn(3, WIDTH)).isfinite().all()


def test_other_dtypes_and_calls_are_the_modules_own() -> None:
    """Where the operator would return another dtype, or was not tried."""
    norm, mlp = LlamaRMSNorm(), LlamaMLP()
    plain_norm, plain_mlp = LlamaRMSNorm(), LlamaMLP()
    plain_mlp.load_state_dict(mlp.state_dict())
    apply_fused_ops(nn.ModuleList((norm, mlp)))
    x = torch.randn(3, WIDTH)
    assert norm(x.bfloat16()).dtype == torch.float32  # as type promotion in the model has it
    assert torch.equal(norm(x.bfloat16()), plain_norm(x.bfloat16()))
    assert torch.equal(norm(x=x), plain_norm(x=x))
    assert torch.equal(mlp(x=x), plain_mlp(x=x))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(norm(x.bfloat16()), plain_norm(x.bfloat16()))
        assert norm(x).dtype == plain_norm(x).dtype
        assert mlp(x).dtype == plain_mlp(x).dtype == torch.bfloat16
        torch.testing.assert_close(mlp(x), plain_mlp(x))
    with pytest.raises(RuntimeError):
        norm(torch.randn(3, WIDTH + 1))


def test_transforms_of_torch_func_work() -> None:
    module = nn.Sequential(LlamaRMSNorm(), LlamaMLP(), PackedMLP())
    x = torch.randn(4, 3, WIDTH)
    apply_fused_ops(module)
    each = torch.stack([module(one) for one in x])
    torch.testing.assert_close(torch.func.vmap(module)(x), each)
    jacobian = torch.func.jacrev(lambda x: module(x).sum())(x)
    torch.testing.assert_close(
        jacobian, torch.autograd.functional.jacobian(lambda x: module(x).sum(), x)
    )


@pytest.mark.filterwarnings(r"ignore:`torch.jit.script\w*` is deprecated")  # torch's own import
def test_forward_mode_works() -> None:
    module = nn.Sequential(LlamaRMSNorm(), LlamaMLP())
    x, tangent = torch.randn(2, 3, WIDTH).unbind()
    expected = torch.autograd.functional.jvp(module, x, tangent)[1]
    apply_fused_ops(module)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(module(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("operators", [("swiglu",), ("rms_norm",)])
def test_operators_that_are_not_asked_for_are_not_used(operators: tuple[str]) -> None:
    module = nn.Sequential(LlamaRMSNorm(), LlamaMLP())
    report = apply_fused_ops(module, FusedOpsConfig(operators=operators)).report()
    assert list(report["fused"]) == (["1"] if operators == ("swiglu",) else ["0"])
    assert not report["left"]
