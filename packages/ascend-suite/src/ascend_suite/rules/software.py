"""What versions of other software there must be. Data; imports no torch."""

from __future__ import annotations

from ascend_suite.finding import Severity
from ascend_suite.predicate import All, AnyOf, Not
from ascend_suite.rule import Rule
from ascend_suite.rules.conditions import training
from ascend_suite.versions import OLDEST_CANN

__all__ = ["SOFTWARE_RULES"]

_MEGATRON = training("megatron_core_version")
_NPU = training("device").equals("npu")

SOFTWARE_RULES = (
    Rule(
        id="software/torch",
        subject="torch_version",
        relation="requires",
        fires_when=training("torch_version").older_than("2.13"),
        what="the suite needs torch 2.13 or newer.",
        because="it is the oldest that the tests really run with.",
        instead="install torch>=2.13.",
        source="compatibility",
    ),
    Rule(
        id="software/megatron-core",
        subject="megatron_core_version",
        relation="requires",
        fires_when=AnyOf(_MEGATRON.older_than("0.16.1"), Not(_MEGATRON.older_than("0.17"))),
        what="the features were tested with megatron-core 0.16.1 alone.",
        because="specs, optimizers and random states of other versions may differ.",
        instead="install megatron-core==0.16.1, or compare the first losses with a run without "
        "the features.",
        source="compatibility",
        scope="megatron-core",
        severity=Severity.WARNING,
    ),
    Rule(
        id="software/no-megatron-core",
        subject="megatron_core_version",
        relation="requires",
        fires_when=All(training("framework").equals("megatron-core"), _MEGATRON.equals(None)),
        what="the plan is for megatron-core, and it is not installed.",
        because="its integrations import it.",
        instead="pip install --no-deps megatron-core==0.16.1, or set framework to 'pytorch'.",
        source="compatibility",
        scope="megatron-core",
    ),
    Rule(
        id="software/no-torch-npu",
        subject="torch_npu_version",
        relation="requires",
        fires_when=All(_NPU, training("torch_npu_version").equals(None)),
        what="the plan is for an NPU, and torch_npu is not installed.",
        because="torch has no device 'npu' without it.",
        instead="install torch_npu and CANN, or set device to 'cpu'.",
        source="compatibility",
    ),
    Rule(
        id="software/torch-npu",
        subject="torch_npu_version",
        relation="requires",
        fires_when=All(
            AnyOf(_NPU, training("torch_npu_version").differs(None)),
            training("torch_npu_version").older_than("2.13"),
        ),
        what="torch_npu is older than the torch that the suite needs.",
        because="a torch_npu works with the torch of its own version alone.",
        instead="install the torch_npu of the same version as torch.",
        source="compatibility",
    ),
    Rule(
        id="software/no-cann",
        subject="cann_version",
        relation="requires",
        fires_when=All(_NPU, training("cann_version").equals(None)),
        what="the plan is for an NPU, and CANN was not found.",
        because="torch_npu calls it for every kernel and copy.",
        instead="install CANN, and source its set_env.sh.",
        source="compatibility",
    ),
    Rule(
        id="software/cann",
        subject="cann_version",
        relation="requires",
        fires_when=training("cann_version").older_than(OLDEST_CANN),
        what="CANN is older than the one that torch_npu names for torch 2.9 and newer.",
        because="operators that torch_npu calls may not be in it.",
        instead=f"install CANN {OLDEST_CANN}.0 or newer.",
        source="the table of versions in torch_npu 2.13.0's description",
        severity=Severity.WARNING,
    ),
)
