"""What the features of the optimizer's state need of training. Data; imports no torch."""

from __future__ import annotations

from ascend_suite.finding import Severity
from ascend_suite.predicate import All, AnyOf, On, Option, Product, Unless
from ascend_suite.rule import Rule
from ascend_suite.rules.conditions import (
    MEGATRON_FSDP,
    ON_MEGATRON,
    OPTIMIZER_FEATURES,
    training,
)

__all__ = ["OPTIMIZER_RULES"]

_ELEMENTWISE = (
    *("AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "Adamax", "NAdam", "RAdam", "Adadelta"),
    *("adamw", "adam", "sgd", "rmsprop", "adagrad", "adamax", "nadam", "radam", "adadelta"),
)
_HOST_MASTERS = All(On("swap-optimizer"), Option("swap-optimizer.master_weights").equals(True))


def _elementwise(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/elementwise",
        subject=feature,
        relation="requires",
        fires_when=All(
            On(feature),
            AnyOf(
                training("elementwise_optimizer").equals(False),
                training("optimizer").outside(_ELEMENTWISE),
            ),
        ),
        what=f"{feature} needs an optimizer of torch that treats every element by itself.",
        because="it steps slices of parameters, and a slice of what LBFGS, Muon, SOAP, Shampoo, "
        "LAMB or Adafactor do is not what they do to a slice; of a class that is not torch's "
        "nobody knows.",
        instead="use AdamW, Adam, SGD, RMSprop, Adagrad, Adamax, NAdam, RAdam or Adadelta; name "
        "the class that yours derives from, if it leaves step alone.",
        source="constraints 71, 74; ascend_core.optim.rules",
    )


def _capturable(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/capturable",
        subject=feature,
        relation="conflicts",
        fires_when=All(On(feature), training("capturable").equals(True)),
        what=f"{feature} and capturable=True of the optimizer cannot be used together.",
        because="the step of a windowed or sharded optimizer is host code around kernels, and no "
        "captured graph has that; it was not tested.",
        instead="build the optimizer with capturable=False.",
        source="refused until proven",
    )


def _dtensor(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/dtensor",
        subject=feature,
        relation="conflicts",
        fires_when=All(
            On(feature),
            AnyOf(
                training("dtensor_parameters").equals(True),
                training("fsdp").differs(None),
                training("use_torch_fsdp2").equals(True),
                MEGATRON_FSDP,
            ),
        ),
        what=f"{feature} and sharded parameters (FSDP, DTensor) cannot be used together.",
        because="such a parameter is a wrapper whose memory comes and goes, or is exchanged, "
        "behind the optimizer's back.",
        instead=f"leave FSDP off, or {feature}: FSDP divides the optimizer's state among the ranks "
        "by itself; with plain parameters reduce-gradients with shard-optimizer does so, and in "
        "megatron-core use_distributed_optimizer.",
        source="constraints 7, 115; refused until proven",
    )


def _zero(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/zero",
        subject=feature,
        relation="conflicts",
        fires_when=All(
            On(feature),
            AnyOf(
                training("deepspeed_zero_stage").more_than(0),
                training("enable_zero3").equals(True),
            ),
        ),
        what=f"{feature} and ZeRO of another library cannot be used together.",
        because="that library keeps masters and moments in buffers of its own, and steps them "
        "itself.",
        instead=f"leave ZeRO off, or {feature}; shard-optimizer divides an optimizer among ranks, "
        "and in megatron-core use_distributed_optimizer does.",
        source="constraints 11, 55",
    )


def _in_backward(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/step-in-backward",
        subject=feature,
        relation="conflicts",
        fires_when=All(On(feature), training("gradient_hook_optimizer").equals(True)),
        what=f"{feature} and an optimizer that steps in gradient hooks cannot be used together.",
        because="there is one optimizer for each parameter then, and its step is in the middle of "
        "backward: nothing is left for windows, buckets or parts of a whole.",
        instead="step once after backward, with one optimizer; release_grads of swap-optimizer "
        "lets gradients go during the step.",
        source="refused until proven",
    )


def _mindspeed_steps(feature: str) -> Rule:
    return Rule(
        id=f"{feature}/mindspeed-step",
        subject=feature,
        relation="conflicts",
        fires_when=All(
            On(feature),
            AnyOf(
                training("optimizer_selection").equals("fused_ema_adamw"),
                training("quant_states").differs(None),
                training("quant_grads").equals(True),
                training("virtual_optimizer").differs(None),
                training("compress_optimizer").equals(True),
                training("smart_swap").equals(True),
            ),
        ),
        what=f"{feature} cannot be used with what else decides how MindSpeed steps, or where "
        "optimizer state lives.",
        because="fused_ema_adamw, quantised, compressed, virtual and smart-swapped states each "
        "have a step or a memory of their own, and state has one place only.",
        instead=f"keep one of them: {feature}, or MindSpeed's option.",
        source="constraints 4, 5, 6, 13, 123",
    )


_FOR_EACH = (_elementwise, _capturable, _dtensor, _zero, _in_backward, _mindspeed_steps)

_SWAP = (
    Rule(
        id="swap-optimizer/mindspeed-adamw",
        subject="swap-optimizer",
        relation="requires",
        fires_when=All(On("swap-optimizer"), training("optimizer_selection").equals("fused_adamw")),
        what="swap-optimizer steps torch's AdamW, and not MindSpeed's.",
        because="any form of torch's optimizers will do, so that optimizer_selection is not "
        "needed; MindSpeed's own AdamW has a step that is not known here.",
        instead="pass torch.optim.AdamW(..., fused=True).",
        source="constraints 3",
        severity=Severity.NOTE,
    ),
    Rule(
        id="swap-optimizer/distributed-optimizer",
        subject="swap-optimizer",
        relation="requires",
        fires_when=All(
            On("swap-optimizer"),
            training("use_distributed_optimizer").equals(False),
        ),
        what="in megatron-core swap-optimizer needs the distributed optimizer.",
        because="megatron-core's other optimizers, which put masters of their own into the groups, "
        "were not tested around it.",
        instead="set use_distributed_optimizer (it works with one rank, too).",
        source="constraints 2",
        scope="megatron-core",
    ),
    Rule(
        id="swap-optimizer/optimizer-cpu-offload",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=All(On("swap-optimizer"), training("optimizer_cpu_offload").equals(True)),
        what="swap-optimizer and optimizer_cpu_offload cannot be used together.",
        because="both put the same state on the host, and each plans with all of its memory.",
        instead="leave optimizer_cpu_offload off: swap-optimizer steps on the device; or leave "
        "swap-optimizer off.",
        source="constraints 120; CC-07",
        scope="megatron-core",
    ),
    Rule(
        id="swap-optimizer/activations-on-the-host",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=All(
            On("swap-optimizer"),
            AnyOf(
                training("cpu_offloading").equals(True),
                training("fine_grained_activation_offloading").equals(True),
                training("adaptive_memory_optimization").equals(True),
                training("adaptive_recompute_device_swap").equals(True),
            ),
        ),
        what="swap-optimizer and another library's offload of activations share the host's "
        "memory, and neither knows of the other.",
        because="each takes what it can get, as if the other were not there.",
        instead="use swap-attention, whose budget is checked together with swap-optimizer's; or "
        "give host_budget_bytes what the other one leaves.",
        source="CC-07",
        scope="megatron-core",
        severity=Severity.WARNING,
    ),
    Rule(
        id="swap-optimizer/precision-aware",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=All(
            On("swap-optimizer"), training("use_precision_aware_optimizer").equals(True)
        ),
        what="swap-optimizer and use_precision_aware_optimizer cannot be used together.",
        because="that option is a promise of Transformer Engine's FusedAdam, whose step is not "
        "torch's.",
        instead="leave use_precision_aware_optimizer off.",
        source="constraints 121",
        scope="megatron-core",
    ),
    Rule(
        id="swap-optimizer/cannot-resume",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=All(
            On("swap-optimizer"),
            training("ckpt_format").equals("torch"),
            training("use_distributed_optimizer").equals(True),
        ),
        what="a run with swap-optimizer cannot be resumed from ckpt_format='torch'.",
        because="that format of the distributed optimizer holds no step counts of torch's Adam, "
        "and needs gloo groups.",
        instead="use ckpt_format='torch_dist'.",
        source="constraints 7; CC-10; features/swap-optimizer",
        scope="megatron-core",
    ),
    Rule(
        id="swap-optimizer/sharded-checkpoint",
        subject="swap-optimizer",
        relation="value",
        fires_when=All(
            On("swap-optimizer"),
            training("ckpt_format").within(("torch_dist", "zarr", "fsdp_dtensor")),
            training("save").differs(None),
            ON_MEGATRON,
        ),
        what="megatron-core's own writer of distributed checkpoints was not run with "
        "swap-optimizer.",
        because="what the distributed optimizer gives it (dp_reshardable) was, saved and loaded "
        "by torch, with equal bits.",
        instead="try to resume early in a run.",
        source="constraints 7; features/swap-optimizer",
        scope="megatron-core",
        severity=Severity.NOTE,
    ),
    Rule(
        id="swap-optimizer/masters-not-saved",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=All(_HOST_MASTERS, training("no_save_optim").equals(True)),
        what="a run with swap-optimizer's masters cannot be resumed where no_save_optim is set.",
        because="the FP32 masters are saved in the optimizer's state alone: training would go on "
        "from rounded weights.",
        instead="leave no_save_optim off.",
        source="CC-10",
    ),
    Rule(
        id="swap-optimizer/masters-not-loaded",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=All(
            _HOST_MASTERS, training("load").differs(None), training("no_load_optim").equals(True)
        ),
        what="swap-optimizer's masters begin as the rounded weights that are loaded.",
        because="the FP32 masters are in the optimizer's state, which no_load_optim leaves out.",
        instead="leave no_load_optim off, unless a new run begins from old weights.",
        source="CC-10",
        severity=Severity.WARNING,
    ),
    Rule(
        id="swap-optimizer/no-masters",
        subject="swap-optimizer",
        relation="value",
        fires_when=All(
            On("swap-optimizer"),
            Option("swap-optimizer.master_weights").equals(False),
            Unless(training("use_distributed_optimizer").equals(True)),
            AnyOf(training("bf16").equals(True), training("fp16").equals(True)),
        ),
        what="swap-optimizer keeps no FP32 masters of these weights.",
        because="master_weights is off by default, as torch's optimizers have it; MindSpeed's "
        "--swap-optimizer always had them.",
        instead="set master_weights=True for what MindSpeed did.",
        source="CC-09",
        scope="pytorch",
        severity=Severity.WARNING,
    ),
    Rule(
        id="swap-optimizer/accumulation",
        subject="swap-optimizer",
        relation="value",
        fires_when=All(
            On("swap-optimizer"),
            Option("swap-optimizer.offload_gradients").equals(True),
            training("num_microbatches").more_than(1),
        ),
        what="each micro-batch brings every gradient to the device and out again.",
        because="offload_gradients adds up on the host: it works with accumulation, bit for bit, "
        "and costs two copies of each gradient for each micro-batch after the first.",
        instead="use release_grads where gradients have room on the device during backward.",
        source="CC-04; tests_integration/test_recompute_swap_optimizer.py",
        severity=Severity.NOTE,
    ),
    Rule(
        id="swap-optimizer/main-grad",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=All(
            On("swap-optimizer"),
            Option("swap-optimizer.offload_gradients").equals(True),
            ON_MEGATRON,
        ),
        what="offload_gradients of swap-optimizer moves nothing in megatron-core.",
        because="megatron-core adds gradients up in a buffer of its own (main_grad), which stays "
        "on the device.",
        instead="leave offload_gradients off.",
        source="CC-04",
        scope="megatron-core",
        severity=Severity.WARNING,
    ),
    Rule(
        id="swap-optimizer/offload-gradients-scaler",
        subject="swap-optimizer",
        relation="conflicts",
        fires_when=All(
            On("swap-optimizer"),
            Option("swap-optimizer.offload_gradients").equals(True),
            training("grad_scaler").equals(True),
        ),
        what="with a gradient scaler swap-optimizer copies every gradient once more in and out.",
        because="the scaler looks at every gradient for infinities, on the device.",
        instead="use release_grads instead of offload_gradients, or BF16, which needs no scaler.",
        source="CC-06; features/swap-optimizer",
        severity=Severity.WARNING,
    ),
    Rule(
        id="swap-optimizer/for-loop",
        subject="swap-optimizer",
        relation="value",
        fires_when=All(
            On("swap-optimizer"),
            training("optimizer_form").equals("for-loop"),
            training("device").within(("npu", "cuda")),
        ),
        what="swap-optimizer around an optimizer in the form for-loop is slow.",
        because="each window takes a dozen kernels for each parameter, and the copies that they "
        "should hide are over long before.",
        instead="build the optimizer with fused=True, or foreach=True.",
        source="CC-06",
        proof="packages/ascend-swap/tests/test_optimizer.py::"
        "test_training_is_equal_to_the_plain_optimizer",
    ),
    Rule(
        id="swap-optimizer/disk",
        subject="swap-optimizer",
        relation="value",
        fires_when=All(
            On("swap-optimizer"),
            Option("swap-optimizer.disk").differs(None),
            training("device").within(("npu", "cuda")),
        ),
        what="swap-optimizer's copies to a disk do not overlap with compute.",
        because="mapped files are not page-locked memory.",
        instead="leave disk out where the host has room, or shard the optimizer over more ranks.",
        source="CC-06; features/swap-optimizer",
        severity=Severity.WARNING,
    ),
)

_REUSE = (
    Rule(
        id="reuse-fp32-param/bf16",
        subject="reuse-fp32-param",
        relation="requires",
        fires_when=All(
            On("reuse-fp32-param"),
            AnyOf(training("bf16").equals(False), training("fp16").equals(True)),
        ),
        what="reuse-fp32-param needs BF16 weights.",
        because="it keeps the upper half of an FP32 master in the weight's own bits, which are "
        "just that for BF16 alone.",
        instead="train with bf16, or leave reuse-fp32-param off.",
        source="constraints 10",
    ),
    Rule(
        id="reuse-fp32-param/distributed-optimizer",
        subject="reuse-fp32-param",
        relation="conflicts",
        fires_when=All(On("reuse-fp32-param"), training("use_distributed_optimizer").equals(True)),
        what="reuse-fp32-param and megatron-core's distributed optimizer cannot be used together.",
        because="it puts FP32 masters of its own into the groups, so that none is left to save; "
        "with it goes overlap_param_gather.",
        instead="use megatron-core's FP32Optimizer around reuse_param(adamw), or leave one of them "
        "off.",
        source="constraints 12; features/reuse-fp32-param",
        scope="megatron-core",
    ),
    Rule(
        id="reuse-fp32-param/fp32-optimizer",
        subject="reuse-fp32-param",
        relation="requires",
        fires_when=All(
            On("reuse-fp32-param"),
            ON_MEGATRON,
            training("bf16").equals(True),
            training("use_distributed_optimizer").equals(False),
        ),
        what="in megatron-core reuse-fp32-param works inside FP32Optimizer alone.",
        because="get_megatron_optimizer makes an optimizer with masters of its own from bf16.",
        instead="build FP32Optimizer(reuse_param(adamw), config, None) yourself.",
        source="features/reuse-fp32-param",
        scope="megatron-core",
        severity=Severity.WARNING,
    ),
    Rule(
        id="reuse-fp32-param/clip-grad",
        subject="reuse-fp32-param",
        relation="requires",
        fires_when=All(
            On("reuse-fp32-param"),
            ON_MEGATRON,
            training("grad_reduce_in_fp32").equals(False),
            training("clip_grad").more_than(0),
        ),
        what="reuse-fp32-param in megatron-core clips only with grad_reduce_in_fp32.",
        because="megatron-core asserts that gradients that are clipped are FP32.",
        instead="set grad_reduce_in_fp32, or clip_grad=0.0.",
        source="features/reuse-fp32-param",
        scope="megatron-core",
    ),
    Rule(
        id="reuse-fp32-param/split",
        subject="reuse-fp32-param",
        relation="value",
        fires_when=All(
            On("reuse-fp32-param"),
            ON_MEGATRON,
            Product(
                training("tensor_model_parallel_size"), training("pipeline_model_parallel_size")
            ).more_than(1),
        ),
        what="resume with reuse-fp32-param at the same tensor and pipeline parallel sizes.",
        because="FP32Optimizer saves each rank's state as it is, and it loads into parameters of "
        "the same shapes alone.",
        instead="to change the split, save the weights alone and begin a new optimizer.",
        source="constraints 14",
        scope="megatron-core",
        severity=Severity.NOTE,
    ),
    Rule(
        id="reuse-fp32-param/sharded-checkpoint",
        subject="reuse-fp32-param",
        relation="conflicts",
        fires_when=All(
            On("reuse-fp32-param"),
            ON_MEGATRON,
            training("ckpt_format").within(("torch_dist", "zarr", "torch_dcp", "fsdp_dtensor")),
            training("save").differs(None),
        ),
        what="reuse-fp32-param was not tested with megatron-core's distributed checkpoints.",
        because="a checkpoint that cannot be resumed from should be refused when it is saved, and "
        "not when it is needed.",
        instead="use ckpt_format='torch'.",
        source="constraints 16; CC-10",
        scope="megatron-core",
    ),
    Rule(
        id="reuse-fp32-param/masters-not-saved",
        subject="reuse-fp32-param",
        relation="conflicts",
        fires_when=All(On("reuse-fp32-param"), training("no_save_optim").equals(True)),
        what="a run with reuse-fp32-param cannot be resumed where no_save_optim is set.",
        because="the lower half of every FP32 master is saved in the optimizer's state alone: "
        "training would go on from rounded weights.",
        instead="leave no_save_optim off.",
        source="CC-10",
    ),
    Rule(
        id="reuse-fp32-param/masters-not-loaded",
        subject="reuse-fp32-param",
        relation="conflicts",
        fires_when=All(
            On("reuse-fp32-param"),
            training("load").differs(None),
            training("no_load_optim").equals(True),
        ),
        what="reuse-fp32-param's masters begin as the rounded weights that are loaded.",
        because="their lower halves are in the optimizer's state, which no_load_optim leaves out.",
        instead="leave no_load_optim off, unless a new run begins from old weights.",
        source="CC-10",
        severity=Severity.WARNING,
    ),
    Rule(
        id="reuse-fp32-param/remainders",
        subject="reuse-fp32-param",
        relation="conflicts",
        fires_when=All(
            On("reuse-fp32-param"), training("use_precision_aware_optimizer").equals(True)
        ),
        what="reuse-fp32-param and use_precision_aware_optimizer cannot be used together.",
        because="that option keeps masters as remainders by itself, in Transformer Engine's "
        "FusedAdam.",
        instead="leave one of them off.",
        source="constraints 121",
        scope="megatron-core",
    ),
    Rule(
        id="reuse-fp32-param/eager-kernels",
        subject="reuse-fp32-param",
        relation="value",
        fires_when=All(
            On("reuse-fp32-param"),
            Option("reuse-fp32-param.kernels").equals("eager"),
            training("device").within(("cpu", "cuda")),
        ),
        what="reuse-fp32-param with kernels='eager' is slow.",
        because="torch's operators split and join in many passes over memory.",
        instead="leave kernels out, and the fastest that gives the same bits is taken.",
        source="CC-06; features/reuse-fp32-param",
        severity=Severity.WARNING,
    ),
)

OPTIMIZER_RULES = (
    *_SWAP,
    *_REUSE,
    *(make(feature) for make in _FOR_EACH for feature in OPTIMIZER_FEATURES),
)
