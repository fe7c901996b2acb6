"""What the recompute features need of training. Data; imports no torch."""

from __future__ import annotations

from ascend_suite.finding import Severity
from ascend_suite.predicate import All, AnyOf, Compare, Not, On, Option, Product, Sum, Unless
from ascend_suite.rule import Rule
from ascend_suite.rules.conditions import FULL_RECOMPUTE, REBUILDING, training

__all__ = ["RECOMPUTE_RULES"]

_COVERED = {
    "recompute-activation": ("mlp", "moe", "moe_act", "shared_experts"),
    "recompute-norm": ("layernorm",),
}
_ROWS = {
    "recompute-activation": {"uniform": "17", "selective": "18", "value": "21, 22"},
    "recompute-norm": {"uniform": "25", "selective": "25", "value": "26"},
    "recompute-layers": {"value": "22"},
}
_STAGES = training("pipeline_model_parallel_size")
_OWN_PLANNERS = AnyOf(
    training("adaptive_recompute_enable").equals(True),
    training("adaptive_recompute_device_swap").equals(True),
    training("adaptive_memory_optimization").equals(True),
    training("automated_pipeline").equals(True),
)
_SELECTIVE = training("recompute_granularity").equals("selective")


def _uniform(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/uniform",
        subject=feature,
        relation="conflicts",
        fires_when=All(On(feature), FULL_RECOMPUTE, training("recompute_method").equals("uniform")),
        what=f"{feature} and recompute_method='uniform' cannot be used together.",
        because="this method recomputes every layer as a whole, and a layer is never both.",
        instead="use recompute_method='block' with a recompute_num_layers below the number of "
        f"layers, or leave {feature} off.",
        source=f"constraints {_ROWS[feature]['uniform']}",
        scope="megatron-core",
    )


def _covers(feature: str) -> Compare:
    return training("recompute_modules").sharing(_COVERED[feature])


def _same_values(feature: str) -> Rule:
    modules = " and ".join(map(repr, _COVERED[feature]))
    return Rule(
        id=f"{feature}/same-values",
        subject=feature,
        relation="conflicts",
        fires_when=All(On(feature), _SELECTIVE, _covers(feature)),
        what=f"{feature} and {modules} in recompute_modules cannot be used together.",
        because="megatron-core's selective recompute covers the same values already.",
        instead=f"take {modules} out of recompute_modules, or leave {feature} off.",
        source=f"constraints {_ROWS[feature]['selective']}",
        scope="megatron-core",
    )


def _selective(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/selective",
        subject=feature,
        relation="conflicts",
        fires_when=All(
            On(feature),
            _SELECTIVE,
            Unless(_covers(feature)),
        ),
        what=f"{feature} and recompute_granularity='selective' are refused together.",
        because="MindSpeed's documents refuse the pair, since both take the same function's place "
        "there.",
        instead=f"leave one of them off; {feature} and core_attn alone have nothing in common.",
        source=f"constraints {_ROWS[feature]['selective']}",
        scope="megatron-core",
        proof="tests_integration/test_recompute_megatron.py::"
        "test_beside_recompute_of_attention_by_megatron",
    )


def _too_many(feature: str) -> Rule:
    number = Option(f"{feature}.num_layers")
    return Rule(
        id=f"{feature}/num-layers",
        subject=feature,
        relation="value",
        fires_when=All(
            On(feature),
            AnyOf(
                number.more_than(training("num_layers")),
                Product(number, _STAGES).more_than(training("num_layers")),
                Option(f"{feature}.layers").reaching(training("num_layers")),
            ),
        ),
        what=f"{feature} asks for more layers than there are.",
        because="num_layers counts the layers of one pipeline stage, and layers are numbered "
        "from 0.",
        instead="lower num_layers, leave it out for all layers, or name other layers.",
        source=f"constraints {_ROWS[feature]['value']}",
    )


def _behind_full(feature: str) -> Rule:
    whole = training("recompute_num_layers")
    number = Option(f"{feature}.num_layers")
    return Rule(
        id=f"{feature}/behind-full-layers",
        subject=feature,
        relation="order",
        fires_when=All(
            On(feature),
            FULL_RECOMPUTE,
            training("recompute_method").equals("block"),
            AnyOf(
                Sum(whole, number).more_than(training("num_layers")),
                whole.at_least(training("num_layers")),
                Product(Sum(whole, number), _STAGES).more_than(training("num_layers")),
                Product(whole, _STAGES).at_least(training("num_layers")),
                Option(f"{feature}.layers").reaching_below(whole),
            ),
        ),
        what=f"recompute_num_layers leaves too few layers for {feature}.",
        because="layers that run again as a whole are counted first, in each pipeline stage, and a "
        "layer is never both.",
        instead=f"lower recompute_num_layers, or num_layers of {feature}, or name later layers.",
        source=f"constraints {_ROWS[feature]['value']}",
        scope="megatron-core",
    )


def _planned(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/planned-by-mindspeed",
        subject=feature,
        relation="conflicts",
        fires_when=All(On(feature), _OWN_PLANNERS),
        what=f"{feature} and MindSpeed's planners of recompute cannot be used together.",
        because="they choose by profiling what is recomputed, as if nobody else did.",
        instead=f"leave the planner off, or {feature}.",
        source="constraints 19, 23, 43, 45",
        scope="megatron-core",
    )


def _hugging_face(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/gradient-checkpointing",
        subject=feature,
        relation="conflicts",
        fires_when=All(On(feature), training("gradient_checkpointing").equals(True)),
        what=f"{feature} is wasted where gradient_checkpointing is on.",
        because="every layer runs again as a whole in backward, so that nothing in it is saved.",
        instead="leave gradient_checkpointing off, or for layers that it cannot reach use "
        "recompute-layers with fewer layers than there are.",
        source="tests_integration/test_recompute_hugging_face.py",
        proof="tests_integration/test_recompute_hugging_face.py::test_five_steps",
    )


def _verify(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/verify",
        subject=feature,
        relation="value",
        fires_when=All(On(feature), Option(f"{feature}.verify").equals(True)),
        what=f"{feature} with verify=True is slow.",
        because="every value is read twice more to be compared: it is for debugging.",
        instead="leave verify off in a run that counts.",
        source="CC-06",
        severity=Severity.WARNING,
    )


def _distributed(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/distributed-activations",
        subject=feature,
        relation="conflicts",
        fires_when=All(On(feature), training("distribute_saved_activations").equals(True)),
        what=f"distribute_saved_activations divides nothing that {feature} keeps.",
        because="it is an option of megatron-core's own full recompute; CheckpointWithoutOutput "
        "refuses it, too.",
        instead="leave it off: sequence parallelism divides activations without it.",
        source="constraints 28",
        scope="megatron-core",
    )


_BY_FEATURE = tuple(
    make(feature)
    for feature in REBUILDING
    for make in (
        *(_uniform, _same_values, _selective, _too_many, _behind_full, _planned),
        *(_hugging_face, _verify, _distributed),
    )
)

_OWN = (
    Rule(
        id="recompute-layers/twice",
        subject="recompute-layers",
        relation="conflicts",
        fires_when=All(On("recompute-layers"), FULL_RECOMPUTE),
        what="recompute-layers and recompute_granularity='full' recompute layers twice.",
        because="megatron-core runs its layers again by itself.",
        instead="leave one of them off.",
        source="constraints 22, 116",
        scope="megatron-core",
    ),
    _hugging_face("recompute-layers"),
    _verify("recompute-layers"),
    _distributed("recompute-layers"),
    _too_many("recompute-layers"),
    Rule(
        id="recompute-layers/compiled",
        subject="recompute-layers",
        relation="conflicts",
        fires_when=All(On("recompute-layers"), training("torch_compile").equals(True)),
        what="recompute-layers does nothing in layers that torch.compile traces.",
        because="there they run as without the feature, and save as much.",
        instead="compile the parts of a layer, or leave the choice to the compiler's own "
        "recompute.",
        source="features/layer-recompute",
        severity=Severity.WARNING,
    ),
    Rule(
        id="recompute-activation/compressed",
        subject="recompute-activation",
        relation="conflicts",
        fires_when=All(
            On("recompute-activation"),
            AnyOf(
                training("compress_dense").differs(None),
                training("compress_activation").differs(None),
            ),
        ),
        what="recompute-activation and compressed activations cannot be used together.",
        because="MindSpeed puts a forward of its own into the MLPs, and keeps there what would "
        "be rebuilt.",
        instead="leave compress_dense and compress_activation off, or recompute-activation.",
        source="constraints 20",
        scope="megatron-core",
    ),
    Rule(
        id="recompute-activation/fused-activation",
        subject="recompute-activation",
        relation="requires",
        fires_when=All(On("recompute-activation"), training("bias_activation_fusion").equals(True)),
        what="recompute-activation sees no fused activation function of megatron-core.",
        because="with bias_activation_fusion it is one opaque function.",
        instead="build the model from with_visible_activation(spec), or with "
        "bias_activation_fusion=False.",
        source="features/megatron",
        scope="megatron-core",
        severity=Severity.WARNING,
    ),
    Rule(
        id="recompute-norm/transformer-engine",
        subject="recompute-norm",
        relation="requires",
        fires_when=All(
            On("recompute-norm"), training("transformer_impl").equals("transformer_engine")
        ),
        what="recompute-norm finds no norm in Transformer Engine's layers.",
        because="norm and linear layer are one module there, which was not tested.",
        instead="use transformer_impl='local', or leave recompute-norm off.",
        source="constraints 27",
        scope="megatron-core",
    ),
)

# What users of megatron-core meet with the options themselves.
_MODULES = ("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts")
_MEGATRON = (
    Rule(
        id="megatron/full-needs-a-method",
        subject="recompute_granularity",
        relation="requires",
        fires_when=All(FULL_RECOMPUTE, training("recompute_method").equals(None)),
        what="recompute_granularity='full' needs recompute_method.",
        because="it says which layers are recomputed.",
        instead="set recompute_method='block' or 'uniform', with recompute_num_layers.",
        source="constraints 116",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/full-needs-a-number",
        subject="recompute_granularity",
        relation="requires",
        fires_when=All(FULL_RECOMPUTE, training("recompute_num_layers").equals(None)),
        what="recompute_granularity='full' needs recompute_num_layers.",
        because="it says how many layers are recomputed (block), or make a group (uniform).",
        instead="set recompute_num_layers.",
        source="constraints 116",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/selective-has-no-number",
        subject="recompute_granularity",
        relation="conflicts",
        fires_when=All(
            _SELECTIVE,
            AnyOf(
                training("recompute_num_layers").differs(None),
                training("recompute_method").differs(None),
            ),
        ),
        what="recompute_granularity='selective' cannot be used with recompute_num_layers and "
        "recompute_method.",
        because="selective recompute takes modules of all layers.",
        instead="leave both out, or write recompute_granularity='full'; for "
        "single values of some layers use recompute-activation with num_layers.",
        source="constraints 53, 116",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/selective-wins",
        subject="recompute_granularity",
        relation="conflicts",
        fires_when=All(FULL_RECOMPUTE, training("recompute_activations").equals(True)),
        what="recompute_granularity='full' and recompute_activations cannot be used together.",
        because="recompute_activations is the former name of recompute_granularity='selective', "
        "and wins in megatron-core's scripts without a word.",
        instead="leave recompute_activations out for full recompute, or recompute_granularity.",
        source="constraints 53",
    ),
    Rule(
        id="megatron/method-without-full",
        subject="recompute_method",
        relation="value",
        fires_when=All(
            training("recompute_granularity").equals(None),
            AnyOf(
                training("recompute_method").differs(None),
                All(
                    training("recompute_num_layers").more_than(0),
                    Not(On("swap-attention")),
                ),
            ),
            Unless(training("recompute_in_advance").equals(True)),
        ),
        what="recompute_method and recompute_num_layers do nothing without "
        "recompute_granularity='full'.",
        because="nothing is recomputed where no granularity is given.",
        instead="write recompute_granularity='full', or leave them out.",
        source="constraints 116; CC-01",
        severity=Severity.WARNING,
    ),
    Rule(
        id="pytorch/granularity",
        subject="recompute_granularity",
        relation="requires",
        fires_when=All(
            training("framework").equals("pytorch"), training("recompute_granularity").differs(None)
        ),
        what="recompute_granularity does nothing in plain PyTorch.",
        because="it is an option of megatron-core's layers.",
        instead="use recompute-layers for whole layers, and recompute-activation and "
        "recompute-norm for single values.",
        source="features/layer-recompute",
        scope="pytorch",
        severity=Severity.WARNING,
    ),
    Rule(
        id="megatron/distributed-activations-need-full",
        subject="distribute_saved_activations",
        relation="requires",
        fires_when=All(
            training("distribute_saved_activations").equals(True),
            AnyOf(
                training("recompute_granularity").equals(None),
                _SELECTIVE,
                training("tensor_model_parallel_size").equals(1),
            ),
        ),
        what="distribute_saved_activations needs recompute_granularity='full' and tensor "
        "parallelism.",
        because="it divides what full recompute saves among the ranks of tensor parallelism.",
        instead="leave distribute_saved_activations off.",
        source="constraints 116; CC-01",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/distributed-activations-and-sequences",
        subject="distribute_saved_activations",
        relation="conflicts",
        fires_when=All(
            training("distribute_saved_activations").equals(True),
            training("sequence_parallel").equals(True),
        ),
        what="distribute_saved_activations and sequence_parallel cannot be used together.",
        because="sequence parallelism has divided the same activations already.",
        instead="leave distribute_saved_activations off.",
        source="constraints 116",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/recompute-modules",
        subject="recompute_modules",
        relation="value",
        fires_when=All(
            _SELECTIVE,
            training("recompute_modules").differs(None),
            training("recompute_modules").outside(_MODULES),
        ),
        what="recompute_modules names a module that selective recompute does not know.",
        because=f"megatron-core knows {', '.join(_MODULES)}.",
        instead="use those names.",
        source="constraints 117; CC-03",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/recompute-modules-without-selective",
        subject="recompute_modules",
        relation="requires",
        fires_when=All(
            training("recompute_modules").differs(None),
            training("recompute_modules").differs(()),
            training("recompute_modules").differs(("core_attn",)),  # megatron-core's own default
            AnyOf(FULL_RECOMPUTE, training("recompute_granularity").equals(None)),
        ),
        what="recompute_modules does nothing without recompute_granularity='selective'.",
        because=f"modules ({', '.join(_MODULES)}) are what selective recompute takes; full "
        "recompute takes whole layers.",
        instead="write recompute_granularity='selective', or leave recompute_modules out.",
        source="constraints 117; CC-03",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/recompute-moe-act",
        subject="recompute_modules",
        relation="requires",
        fires_when=All(
            _SELECTIVE,
            training("recompute_modules").holding("moe_act"),
            training("moe_grouped_gemm").equals(False),
        ),
        what="'moe_act' in recompute_modules needs moe_grouped_gemm.",
        because="only the grouped experts' activation function can be recomputed.",
        instead="set moe_grouped_gemm, or take 'moe_act' out.",
        source="constraints 117",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/recompute-mla",
        subject="recompute_modules",
        relation="requires",
        fires_when=All(
            _SELECTIVE,
            training("recompute_modules").holding("mla_up_proj"),
            training("multi_latent_attention").equals(False),
        ),
        what="'mla_up_proj' in recompute_modules needs multi_latent_attention.",
        because="no other attention has that projection.",
        instead="take 'mla_up_proj' out.",
        source="constraints 117",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/recompute-shared-experts",
        subject="recompute_modules",
        relation="conflicts",
        fires_when=All(
            _SELECTIVE,
            training("recompute_modules").holding("shared_experts"),
            training("moe_shared_expert_overlap").equals(True),
        ),
        what="'shared_experts' in recompute_modules and moe_shared_expert_overlap cannot be used "
        "together.",
        because="experts that compute beside communication cannot run again.",
        instead="leave one of them off.",
        source="constraints 117",
        scope="megatron-core",
    ),
    Rule(
        id="megatron/recompute-fp8",
        subject="recompute_modules",
        relation="conflicts",
        fires_when=All(
            _SELECTIVE,
            AnyOf(
                training("recompute_modules").holding("moe_act"),
                training("recompute_modules").holding("layernorm"),
            ),
            training("fp8").differs(None),
            AnyOf(
                training("fp8_recipe").equals("delayed"),
                training("transformer_engine_version").older_than("2.6.0.dev0"),
            ),
        ),
        what="with fp8 'moe_act' and 'layernorm' in recompute_modules need another recipe than "
        "'delayed', and Transformer Engine 2.6.",
        because="delayed scaling would see a value twice.",
        instead="use another fp8_recipe, or take them out of recompute_modules.",
        source="constraints 117",
        scope="megatron-core",
    ),
)

RECOMPUTE_RULES = (*_BY_FEATURE, *_OWN, *_MEGATRON)
