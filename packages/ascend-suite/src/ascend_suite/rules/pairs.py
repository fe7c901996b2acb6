"""What features of the suite are to one another. Data; imports no torch."""

from __future__ import annotations

from ascend_suite.finding import Severity
from ascend_suite.predicate import All, AnyOf, Not, On, Option, Product, Sum
from ascend_suite.rule import Predicate, Rule

__all__ = ["PAIR_RULES"]

_ALL_LAYERS = All(
    On("recompute-layers"),
    AnyOf(
        Option("recompute-layers.method").equals("uniform"),
        All(
            Option("recompute-layers.num_layers").equals(None),
            Option("recompute-layers.layers").equals(None),
        ),
    ),
)
_SWAPS = Sum(Option("swap-attention.host_budget"), Option("swap-optimizer.host_budget_bytes"))


def _both(first: str, second: str, *parts: Predicate) -> All:
    return All(On(first), On(second), *parts)


def _same_layers(feature: str) -> AnyOf:
    named = Option(f"{feature}.layers")
    return AnyOf(
        named.sharing(Option("recompute-layers.layers")),
        All(
            Option("recompute-layers.method").equals("block"),
            named.reaching_below(Option("recompute-layers.num_layers")),
        ),
    )


def _more_than_all(feature: str) -> AnyOf:
    both = Sum(Option("recompute-layers.num_layers"), Option(f"{feature}.num_layers"))
    layers = Option("training.num_layers")
    stages = Option("training.pipeline_model_parallel_size")
    return AnyOf(both.more_than(layers), Product(both, stages).more_than(layers))


PAIR_RULES = (
    Rule(
        id="swap-optimizer/reuse-fp32-param",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=_both("swap-optimizer", "reuse-fp32-param"),
        what="swap-optimizer and reuse-fp32-param cannot be used together.",
        because="each of them decides where FP32 masters live: reuse-fp32-param in the bits of the "
        "BF16 weight, swap-optimizer on the host.",
        instead="keep swap-optimizer where optimizer state dominates (it moves 12 bytes of each "
        "parameter), and reuse-fp32-param where time does (it saves 2 without a copy).",
        source="constraints 1",
    ),
    Rule(
        id="swap-optimizer/offload-gradients-of-buckets",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=_both(
            "swap-optimizer",
            "reduce-gradients",
            Not(On("shard-optimizer")),
            Option("swap-optimizer.offload_gradients").equals(True),
        ),
        what="swap-optimizer cannot offload gradients that reduce-gradients puts into buckets.",
        because="a bucket is sent when its last gradient is there, and a gradient that has left "
        "for the host is not in it.",
        instead="leave offload_gradients off.",
        source="features/reduce-gradients: gradients are views of the buckets",
    ),
    Rule(
        id="swap-optimizer/release-gradients-of-buckets",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=_both(
            "swap-optimizer",
            "reduce-gradients",
            Not(On("shard-optimizer")),
            Option("swap-optimizer.release_grads").equals(True),
        ),
        what="release_grads of swap-optimizer frees nothing where reduce-gradients is on.",
        because="gradients are views of the buckets, which stay when one of them is dropped.",
        instead="leave release_grads off.",
        source="features/reduce-gradients: gradients are views of the buckets",
        severity=Severity.WARNING,
    ),
    Rule(
        id="swap-optimizer/offload-gradients-of-parts",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=_both(
            "swap-optimizer",
            "shard-optimizer",
            Option("swap-optimizer.offload_gradients").equals(True),
        ),
        what="offload_gradients of swap-optimizer moves nothing during backward where the "
        "optimizer is sharded.",
        because="the gradients of a rank's parts come from the reduction, and not from backward.",
        instead="leave offload_gradients off, or use release_grads.",
        source="tests_integration/test_sharded_optimizer.py::with_gradients",
        severity=Severity.WARNING,
    ),
    Rule(
        id="shard-optimizer/reduction",
        subject="shard-optimizer",
        relation="requires",
        fires_when=All(On("shard-optimizer"), Not(On("reduce-gradients"))),
        what="shard-optimizer needs reduce-gradients.",
        because="each rank steps its part of the buckets that reduce-gradients makes.",
        instead="turn on reduce-gradients with mode='reduce-scatter', too.",
        source="constraints 65, 69",
        scope="pytorch",
    ),
    Rule(
        id="shard-optimizer/mode",
        subject="reduce-gradients",
        relation="requires",
        fires_when=_both(
            "shard-optimizer",
            "reduce-gradients",
            Option("reduce-gradients.mode").differs("reduce-scatter"),
        ),
        what="shard-optimizer needs reduce-gradients with mode='reduce-scatter'.",
        because="with another mode every rank gets whole gradients, of which it needs its part "
        "alone.",
        instead="set mode='reduce-scatter' in reduce-gradients.",
        source="constraints 65, 69",
        scope="pytorch",
    ),
    Rule(
        id="reduce-gradients/parts-without-owner",
        subject="reduce-gradients",
        relation="requires",
        fires_when=All(
            On("reduce-gradients"),
            Not(On("shard-optimizer")),
            Option("reduce-gradients.mode").equals("reduce-scatter"),
        ),
        what="reduce-gradients with mode='reduce-scatter' needs shard-optimizer.",
        because="gradients are then nowhere whole, and every parameter's grad is None: an "
        "optimizer that is not sharded steps nothing, without a word.",
        instead="turn on shard-optimizer, or use mode='all-reduce'.",
        source="features/reduce-gradients",
        scope="pytorch",
    ),
    Rule(
        id="recompute-activation/all-layers-recomputed",
        subject="recompute-activation",
        relation="conflicts",
        fires_when=All(On("recompute-activation"), _ALL_LAYERS),
        what="recompute-activation has no layer left: recompute-layers takes them all.",
        because="a layer that runs again as a whole saves none of the values that would be "
        "rebuilt.",
        instead="give recompute-layers method='block' and fewer layers than there are, or leave "
        "recompute-activation off.",
        source="constraints 17, 22",
    ),
    Rule(
        id="recompute-activation/same-layers",
        subject="recompute-activation",
        relation="order",
        fires_when=_both(
            "recompute-activation",
            "recompute-layers",
            _same_layers("recompute-activation"),
        ),
        what="recompute-activation and recompute-layers name the same layers.",
        because="layers that run again as a whole are counted first, and a layer is never both.",
        instead="name other layers for one of them.",
        source="constraints 22",
    ),
    Rule(
        id="recompute-activation/more-layers-than-left",
        subject="recompute-activation",
        relation="value",
        fires_when=_both(
            "recompute-activation",
            "recompute-layers",
            Option("recompute-layers.method").equals("block"),
            _more_than_all("recompute-activation"),
        ),
        what="recompute-layers and recompute-activation ask for more layers than there are.",
        because="layers that run again as a whole are counted first, and a layer is never both; "
        "num_layers counts those of one pipeline stage.",
        instead="lower num_layers of one of them.",
        source="constraints 22",
    ),
    Rule(
        id="recompute-norm/all-layers-recomputed",
        subject="recompute-norm",
        relation="conflicts",
        fires_when=All(On("recompute-norm"), _ALL_LAYERS),
        what="recompute-norm has no layer left: recompute-layers takes them all.",
        because="a layer that runs again as a whole saves none of the values that would be "
        "rebuilt.",
        instead="give recompute-layers method='block' and fewer layers than there are, or leave "
        "recompute-norm off.",
        source="constraints 25",
    ),
    Rule(
        id="recompute-norm/same-layers",
        subject="recompute-norm",
        relation="order",
        fires_when=_both(
            "recompute-norm",
            "recompute-layers",
            _same_layers("recompute-norm"),
        ),
        what="recompute-norm and recompute-layers name the same layers.",
        because="layers that run again as a whole are counted first, and a layer is never both.",
        instead="name other layers for one of them.",
        source="constraints 25",
    ),
    Rule(
        id="recompute-norm/more-layers-than-left",
        subject="recompute-norm",
        relation="value",
        fires_when=_both(
            "recompute-norm",
            "recompute-layers",
            Option("recompute-layers.method").equals("block"),
            _more_than_all("recompute-norm"),
        ),
        what="recompute-layers and recompute-norm ask for more layers than there are.",
        because="layers that run again as a whole are counted first, and a layer is never both; "
        "num_layers counts those of one pipeline stage.",
        instead="lower num_layers of one of them.",
        source="constraints 25",
    ),
    Rule(
        id="swap-attention/all-layers-recomputed",
        subject="swap-attention",
        relation="conflicts",
        fires_when=All(On("swap-attention"), _ALL_LAYERS),
        what="swap-attention has nothing to move: recompute-layers runs every layer again.",
        because="within a layer that is recomputed nothing is saved until backward, and what is "
        "saved then is needed at once.",
        instead="give recompute-layers method='block' and fewer layers than there are: the others' "
        "activations move.",
        source="constraints 38, 39",
        proof="tests_integration/test_allowed_plans.py::"
        "test_attention_in_layers_that_all_run_again",
    ),
    Rule(
        id="swap-attention/mlp-recomputed-twice",
        subject="swap-attention",
        relation="conflicts",
        fires_when=_both(
            "swap-attention",
            "recompute-activation",
            Option("swap-attention.recompute_num_layers").differs(None),
            AnyOf(
                Option("recompute-activation.layers").equals(None),
                Option("recompute-activation.layers").reaching_below(
                    Option("swap-attention.recompute_num_layers")
                ),
            ),
        ),
        what="swap-attention's recompute_num_layers and recompute-activation recompute the same "
        "MLPs.",
        because="the first layers' MLPs run again as a whole, so that nothing of them is left to "
        "rebuild.",
        instead="leave recompute_num_layers out, or give recompute-activation the layers behind "
        "those.",
        source="constraints 22, 39",
        proof="tests_integration/test_allowed_plans.py::test_mlps_that_run_again_and_are_rebuilt",
    ),
    Rule(
        id="swap-attention/swap-optimizer-host-budget",
        subject="swap-attention",
        relation="conflicts",
        fires_when=_both(
            "swap-attention",
            "swap-optimizer",
            _SWAPS.more_than(Option("training.pinned_limit_bytes")),
        ),
        what="swap-attention and swap-optimizer may together take more host memory than can be "
        "pinned.",
        because="each keeps to its own budget, as if the other were not there, and the sum is "
        "above the limit.",
        instead="divide pinned_limit_bytes between host_budget and host_budget_bytes.",
        source="CC-07",
    ),
    Rule(
        id="swap-attention/swap-optimizer-no-budget",
        subject="swap-attention",
        relation="conflicts",
        fires_when=_both(
            "swap-attention",
            "swap-optimizer",
            Option("training.pinned_limit_bytes").more_than(0),
            AnyOf(
                Option("swap-attention.host_budget").equals(None),
                Option("swap-optimizer.host_budget_bytes").equals(None),
            ),
        ),
        what="swap-attention and swap-optimizer share the host's memory, and not each has a "
        "budget.",
        because="what can be pinned is limited here, and the one without a budget takes what it "
        "can get: optimizer state is taken first, and does not start without.",
        instead="give host_budget and host_budget_bytes, with a sum below pinned_limit_bytes.",
        source="CC-07",
        severity=Severity.WARNING,
    ),
    Rule(
        id="fused-ops/recompute-activation-policy",
        subject="recompute-activation",
        relation="requires",
        fires_when=_both(
            "fused-ops",
            "recompute-activation",
            Option("fused-ops.operators").holding("swiglu"),
            Option("recompute-activation.policy").equals(None),
        ),
        what="recompute-activation rebuilds nothing of the MLPs that fused-ops computes.",
        because="their activation is one operator, which is not in the default policy.",
        instead="give recompute-activation policy.DEFAULT.extended("
        "torch.ops.ascend_ops.swiglu_pair.default), or leave it off: the operator saves its "
        "inputs alone.",
        source="features/fused-ops",
        severity=Severity.WARNING,
    ),
    Rule(
        id="fused-ops/recompute-norm-policy",
        subject="recompute-norm",
        relation="requires",
        fires_when=_both(
            "fused-ops",
            "recompute-norm",
            Option("fused-ops.operators").holding("rms_norm"),
            Option("recompute-norm.policy").equals(None),
        ),
        what="recompute-norm rebuilds nothing of the norms that fused-ops computes.",
        because="each is one operator, which is not in the default policy.",
        instead="give recompute-norm a policy extended by torch.ops.ascend_ops.rms_norm.default, "
        "or leave one of them off.",
        source="features/fused-ops",
        severity=Severity.WARNING,
    ),
)
