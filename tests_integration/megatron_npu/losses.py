"""The losses of the CPU, kept in `cpu_losses.json`.

    python -m tests_integration.megatron_npu.losses

makes the file again, from the root of the repository in the environment of `nox -s integration`. It
is needed where a configuration is new or changed, or megatron-core or torch is.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests_integration.megatron_npu import launch
from tests_integration.megatron_npu.configurations import BY_WORLD, trained_on_cpu
from tests_integration.megatron_npu.launch import Outcome

KEPT = Path(__file__).with_name("cpu_losses.json")


def kept(world: int) -> dict[str, Outcome]:
    """What came of training on the CPU, by configuration."""
    found = json.loads(KEPT.read_text())[str(world)]
    return {
        name: Outcome(losses=tuple(each["losses"]), norms=tuple(each["norms"]))
        for name, each in found.items()
    }


def make() -> None:
    """Train on the CPU, and keep what came of it.

    Raises:
        RuntimeError: When a configuration fails.
    """
    found: dict[int, dict[str, dict[str, object]]] = {}
    for world in BY_WORLD:
        found[world] = {}
        outcomes = launch.run(trained_on_cpu(world), world=world, device="cpu")
        for name, outcome in outcomes.items():
            if outcome.error is not None:
                raise RuntimeError(f"{name}: {outcome.error}")
            found[world][name] = {
                "mean losses": outcome.means(),  # for people to read
                "losses": outcome.losses,
                "norms": outcome.norms,
            }
    KEPT.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    make()
