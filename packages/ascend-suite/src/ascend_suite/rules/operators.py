"""What fused operators and ALiBi need of training. Data; imports no torch."""

from __future__ import annotations

from ascend_suite.finding import Severity
from ascend_suite.predicate import All, AnyOf, On, Option
from ascend_suite.rule import Rule
from ascend_suite.rules.conditions import training

__all__ = ["OPERATOR_RULES"]

_ON = On("fused-ops")
_SWIGLU = Option("fused-ops.operators").holding("swiglu")
_RMS_NORM = Option("fused-ops.operators").holding("rms_norm")
_BACKEND = Option("fused-ops.backend")
_ALIBI = training("position_embedding_type").equals("alibi")
_BACKENDS = {"npu": "npu", "triton": "cuda", "cpu": "cpu"}
_OPERATORS = {"swiglu": ("npu_swiglu", _SWIGLU), "rms_norm": ("npu_rms_norm", _RMS_NORM)}


def _wrong_device(backend: str, device: str) -> Rule:
    return Rule(
        id=f"fused-ops/backend-{backend}",
        subject="fused-ops",
        relation="requires",
        fires_when=All(_ON, _BACKEND.equals(backend), training("device").differs(device)),
        what=f"fused-ops with backend={backend!r} needs device {device!r}.",
        because="its kernels run there alone.",
        instead="leave backend out, and the best one for each call is taken.",
        source="features/fused-ops",
    )


def _lacking(operator: str) -> Rule:
    name, chosen = _OPERATORS[operator]
    return Rule(
        id=f"fused-ops/{name.replace('_', '-')}",
        subject="fused-ops",
        relation="requires",
        fires_when=All(
            _ON,
            chosen,
            training("device").equals("npu"),
            training("npu_operators").lacking(name),
        ),
        what=f"this torch_npu has no {name}, by which fused-ops computes {operator}.",
        because="torch's operators compute it instead, which is right and slower.",
        instead="update torch_npu and CANN together, or leave the operator out.",
        source="features/fused-ops",
        severity=Severity.WARNING,
    )


_FUSED = (
    Rule(
        id="fused-ops/swiglu",
        subject="fused-ops",
        relation="requires",
        fires_when=All(_ON, _SWIGLU, training("gated_linear_unit").equals(False)),
        what="'swiglu' of fused-ops needs MLPs that are gated (--swiglu).",
        because="it computes silu(gate) * up of the halves of what the first linear layer returns.",
        instead="set gated_linear_unit (--swiglu), or leave 'swiglu' out of operators.",
        source="constraints 76",
        scope="megatron-core",
    ),
    Rule(
        id="fused-ops/rms-norm",
        subject="fused-ops",
        relation="requires",
        fires_when=All(_ON, _RMS_NORM, training("normalization").equals("LayerNorm")),
        what="'rms_norm' of fused-ops needs normalization='RMSNorm'.",
        because="it computes RMSNorm alone.",
        instead="set normalization='RMSNorm', or leave 'rms_norm' out of operators.",
        source="constraints 77",
        scope="megatron-core",
    ),
    Rule(
        id="fused-ops/norms-of-two-dimensions",
        subject="fused-ops",
        relation="conflicts",
        fires_when=All(
            _ON,
            _RMS_NORM,
            AnyOf(training("tp_2d").equals(True), training("use_nd_matmul").equals(True)),
        ),
        what="'rms_norm' of fused-ops cannot be used with tp_2d and use_nd_matmul.",
        because="there a row of hidden states is divided over ranks, and a norm has to ask them.",
        instead="leave 'rms_norm' out of operators.",
        source="constraints 77, 78",
        scope="megatron-core",
    ),
    Rule(
        id="fused-ops/transformer-engine",
        subject="fused-ops",
        relation="conflicts",
        fires_when=All(_ON, training("transformer_impl").equals("transformer_engine")),
        what="fused-ops finds nothing in Transformer Engine's layers.",
        because="they compute norms and activations by kernels of their own, and were not tested.",
        instead="use transformer_impl='local', or leave fused-ops off.",
        source="features/megatron",
        scope="megatron-core",
    ),
    Rule(
        id="fused-ops/rotary-flag",
        subject="fused-ops",
        relation="requires",
        fires_when=training("use_fused_rotary_pos_emb").equals(True),
        what="use_fused_rotary_pos_emb has no counterpart here.",
        because="megatron-core's attention calls a function that no spec names, so that it could "
        "be exchanged by a patch alone.",
        instead="leave it off, or set apply_rope_fusion for megatron-core's own; in a model of "
        "your own call ascend_ops.rotary.",
        source="constraints 79; features/megatron",
        scope="megatron-core",
        severity=Severity.WARNING,
    ),
    Rule(
        id="fused-ops/no-torch-npu",
        subject="fused-ops",
        relation="requires",
        fires_when=All(
            _ON,
            training("torch_npu_version").equals(None),
            AnyOf(training("device").equals("npu"), _BACKEND.equals("npu")),
        ),
        what="fused-ops on an NPU needs torch_npu.",
        because="it is not installed, and its operators are what computes there.",
        instead="install torch_npu and CANN.",
        source="features/fused-ops",
    ),
)

_OF_ALIBI = (
    Rule(
        id="alibi/context-parallel",
        subject="position_embedding_type",
        relation="conflicts",
        fires_when=All(_ALIBI, training("context_parallel_size").more_than(1)),
        what="ALiBi and context parallelism cannot be used together.",
        because="a rank would have to know where its part of the sequence stands: the bias grows "
        "with the distance of query and key.",
        instead="set context_parallel_size to 1, or use another position_embedding_type.",
        source="constraints 59, 60, 61; CC-05",
    ),
    Rule(
        id="alibi/dropout",
        subject="position_embedding_type",
        relation="conflicts",
        fires_when=All(_ALIBI, training("attention_dropout").more_than(0)),
        what="ALiBi attention has no dropout.",
        because="its operator makes no mask of the weights.",
        instead="set attention_dropout to 0.",
        source="constraints 61; features/alibi",
    ),
    Rule(
        id="alibi/rotary",
        subject="position_embedding_type",
        relation="conflicts",
        fires_when=All(
            _ALIBI,
            AnyOf(
                training("use_rotary_position_embeddings").equals(True),
                training("use_fused_rotary_pos_emb").equals(True),
                training("apply_rope_fusion").equals(True),
            ),
        ),
        what="ALiBi and rotary embedding cannot be used together.",
        because="both say how positions are told apart.",
        instead="leave one of them out.",
        source="constraints 79; features/megatron",
        scope="megatron-core",
    ),
    Rule(
        id="alibi/documents",
        subject="position_embedding_type",
        relation="conflicts",
        fires_when=All(_ALIBI, training("reset_attention_mask").equals(True)),
        what="ALiBi attention does not end at the end of a document.",
        because="it looks at the keys behind a query, and a mask that hides others of them is "
        "refused when it is first called.",
        instead="leave reset_attention_mask off.",
        source="features/megatron",
        scope="megatron-core",
    ),
    Rule(
        id="alibi/type",
        subject="alibi_fusion_attn_type",
        relation="value",
        fires_when=All(_ALIBI, training("alibi_fusion_attn_type").differs(None)),
        what="alibi_fusion_attn_type is not needed.",
        because="slopes are passed (MindSpeed's type 2) wherever the operator takes them, and no "
        "other option follows from it.",
        instead="leave it out, and use_fusion_attn_v2 with it.",
        source="constraints 56, 57, 58",
        scope="megatron-core",
        severity=Severity.NOTE,
    ),
    Rule(
        id="alibi/unknown-type",
        subject="alibi_fusion_attn_type",
        relation="value",
        fires_when=All(
            training("alibi_fusion_attn_type").differs(None),
            training("alibi_fusion_attn_type").outside((0, 2)),
        ),
        what="alibi_fusion_attn_type is 0 or 2.",
        because="MindSpeed's kernels take a bias by a matrix (0) or by slopes (2).",
        instead="leave it out: slopes are passed wherever the operator takes them.",
        source="constraints 56",
        scope="megatron-core",
    ),
    Rule(
        id="alibi/npu-operator",
        subject="position_embedding_type",
        relation="requires",
        fires_when=All(
            _ALIBI,
            training("device").equals("npu"),
            training("npu_operators").lacking("npu_fusion_attention_v2"),
        ),
        what="this torch_npu has no npu_fusion_attention_v2, by which ALiBi attention is computed.",
        because="torch's operators compute it instead, with a matrix of scores.",
        instead="update torch_npu and CANN together.",
        source="features/alibi",
        severity=Severity.WARNING,
    ),
)

OPERATOR_RULES = (
    *_FUSED,
    *(_wrong_device(backend, device) for backend, device in _BACKENDS.items()),
    *(_lacking(operator) for operator in _OPERATORS),
    *_OF_ALIBI,
)
