"""Train configurations in processes, one per rank, and say of each what came of it.

All configurations run one after the other in the same processes, whose start takes longest. One
that fails does not take the others with it: those that follow it run in new processes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORKER = ("-m", "tests_integration.megatron_npu.worker")
PATIENCE_SECONDS = 180.0  # for one configuration, or the start, which may compile the simulator
TAIL = 2_000  # characters of a rank's output in a message

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",  # what needs torch_npu imports it
    "ASCENDSIM_STRICT": "1",
    # So that losses kept in a file are those of every x86-64 processor with AVX2.
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_CBWR": "COMPATIBLE",
}


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a configuration.

    Attributes:
        losses: Of each step, those of the micro batches, in hexadecimal; rank after rank.
        norms: Of each step, the norm of all gradients, in hexadecimal.
        digests: Of each rank, of its gradients and weights after the last step.
        reports: Of each rank, what swap-attention reported.
        error: Why there are none.
        seconds: How long it took.
    """

    losses: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()
    reports: tuple[dict[str, Any], ...] = ()
    error: str | None = None
    seconds: float = 0.0

    def means(self) -> list[float]:
        """The mean loss of each step, to six decimals."""
        steps = [[float.fromhex(loss) for loss in step.split()] for step in self.losses]
        return [round(sum(step) / len(step), 6) for step in steps]


def run(
    names: Sequence[str],
    *,
    world: int,
    device: str,
    worker: Sequence[str] = WORKER,
    patience: float = PATIENCE_SECONDS,
) -> dict[str, Outcome]:
    """Train `names`, configurations of `world` ranks.

    Args:
        names: Of `configurations.BY_WORLD[world]`.
        world: How many processes.
        device: "cpu", or the schedule of a simulated NPU.
        worker: What Python runs, before the arguments of `worker`.
        patience: Seconds in which a rank must get on.
    """
    outcomes: dict[str, Outcome] = {}
    with tempfile.TemporaryDirectory() as home:
        while pending := [name for name in names if name not in outcomes]:
            folder = Path(tempfile.mkdtemp(dir=home))
            commands = [
                [*worker, str(folder), str(rank), str(world), device, *pending]
                for rank in range(world)
            ]
            with _Ranks(folder, commands) as ranks:
                problem = ranks.wait(patience)
            outcomes |= _outcomes(folder, world, pending, problem)
    return outcomes


class _Ranks:
    """The processes, which end with the context at the latest."""

    def __init__(self, folder: Path, commands: Sequence[Sequence[str]]) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        environment = {**os.environ, **ENVIRONMENT}
        for rank, command in enumerate(commands):
            python = [sys.executable, *command]
            with self._log(rank).open("w") as log:
                process = subprocess.Popen(
                    python, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env=environment
                )
            self._processes.append(process)

    def __enter__(self) -> _Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.wait()

    def wait(self, patience: float) -> str | None:
        """Wait until all have ended well, or say what went wrong first.

        Ranks that are behind one that failed may come to where it failed: what lies before that
        it has finished, and so can they.
        """
        failed, progress, since = None, -1, time.monotonic()
        while True:
            codes = [process.poll() for process in self._processes]
            if failed is None:
                failed = next((rank for rank, code in enumerate(codes) if code), None)
            impatient = time.monotonic() - since > patience
            if failed is not None and (impatient or not self._behind(failed, codes)):
                return f"Rank {failed} ended with {codes[failed]}. {self._last_words(failed)}"
            if None not in codes:
                return None
            if impatient:
                running = [rank for rank, code in enumerate(codes) if code is None]
                words = " ".join(self._last_words(rank) for rank in running)
                return f"Nothing happened for {patience:.0f} seconds. {words}"
            if (now := self._progress()) != progress:
                progress, since = now, time.monotonic()
            time.sleep(0.05)

    def _behind(self, failed: int, codes: Sequence[int | None]) -> bool:
        """Whether a rank still runs that has not begun the last that `failed` began."""
        begun = list(_told(self._folder, failed))
        running = [rank for rank, code in enumerate(codes) if code is None]
        return bool(begun) and any(begun[-1] not in _told(self._folder, rank) for rank in running)

    def _progress(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob("*.jsonl"))

    def _log(self, rank: int) -> Path:
        return self._folder / f"{rank}.log"

    def _last_words(self, rank: int) -> str:
        text = self._log(rank).read_text(errors="replace").strip()
        return f"The last that rank {rank} wrote:\n{text[-TAIL:]}\n" if text else ""


def _outcomes(
    folder: Path, world: int, names: Sequence[str], problem: str | None
) -> dict[str, Outcome]:
    """What the ranks told; the first configuration that not all have finished has the problem."""
    told = [_told(folder, rank) for rank in range(world)]
    outcomes: dict[str, Outcome] = {}
    for name in names:
        of_ranks = [ends[name] for ends in told if "losses" in ends.get(name, {})]
        if len(of_ranks) < world:
            started = any(told)
            failed = [name] if started else names  # what cannot start, cannot start with the next
            why = problem or "The ranks ended without having trained it."
            return outcomes | {name: Outcome(error=why) for name in failed}
        steps = zip(*(found["losses"] for found in of_ranks), strict=True)
        outcomes[name] = Outcome(
            losses=tuple(" ".join(itertools.chain(*step)) for step in steps),
            norms=tuple(of_ranks[0]["norms"]),
            digests=tuple(found.get("digest", "") for found in of_ranks),
            reports=tuple(found.get("report", {}) for found in of_ranks),
            seconds=max(found["seconds"] for found in of_ranks),
        )
    return outcomes


def _told(folder: Path, rank: int) -> dict[str, Any]:
    """The last line about each configuration; one that was cut off is none."""
    path = folder / f"{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {line["name"]: line for line in found}
