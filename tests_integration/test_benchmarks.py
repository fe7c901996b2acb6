"""The benchmark harness: what it compares, what it writes, what it refuses."""

from __future__ import annotations

import json
import math
import random
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from ascend_core.errors import ConfigError  # noqa: E402
from ascend_core.testing import held_bytes  # noqa: E402
from benchmarks.__main__ import chosen_names, main  # noqa: E402
from benchmarks.case import Case, Variant  # noqa: E402
from benchmarks.report import document, result_path, table  # noqa: E402
from benchmarks.timing import Row, median_with_spread, run_case  # noqa: E402


def work(amount: int) -> None:
    sum(range(amount))


def slow_and_fast(calls: list[str] | None = None) -> dict[str, Variant]:
    log = calls if calls is not None else []
    x = torch.randn(256, requires_grad=True)

    def step(name: str, amount: int) -> None:
        log.append(name)
        work(amount)

    return {
        "double": Variant(
            lambda: step("double", 400_000), lambda: held_bytes(lambda: x.exp().exp())
        ),
        "plain": Variant(lambda: step("plain", 200_000), lambda: held_bytes(x.exp)),
        "unmeasured": Variant(lambda: step("unmeasured", 200_000)),
    }


def rows_of(case: Case) -> dict[str, Row]:
    return {row.variant: row for row in run_case("self", case)}


def test_a_variant_that_does_twice_the_work_takes_twice_the_time() -> None:
    rows = rows_of(Case("sums", slow_and_fast, rounds=15))
    assert rows["plain"].ratio == rows["plain"].ratio_low == rows["plain"].ratio_high == 1.0
    assert 1.5 < rows["double"].ratio < 2.6
    assert 0.7 < rows["unmeasured"].ratio < 1.4
    for row in rows.values():
        assert row.ratio_low <= row.ratio <= row.ratio_high
        assert row.rounds == 15


def test_bytes_are_measured_where_the_variant_says_how() -> None:
    rows = rows_of(Case("sums", slow_and_fast, rounds=1, warmup=0))
    assert rows["plain"].bytes == 1024
    assert rows["double"].bytes == 2048
    assert rows["unmeasured"].bytes is None


def test_variants_take_turns_forwards_and_backwards() -> None:
    calls: list[str] = []
    run_case("self", Case("sums", lambda: slow_and_fast(calls), rounds=2, warmup=1))
    forwards = ["plain", "double", "unmeasured"]
    assert calls == forwards + forwards + forwards[::-1]


def test_a_baseline_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="no variant called 'rival'"):
        run_case("self", Case("sums", slow_and_fast, baseline="rival"))


@pytest.mark.parametrize("count", [6, 15, 25, 100])
def test_the_spread_holds_the_true_median_as_often_as_it_says(count: int) -> None:
    numbers = random.Random(count)
    trials = 2000
    held = 0
    for _ in range(trials):
        values = [numbers.lognormvariate(0, 1) for _ in range(count)]  # the true median is 1
        ratio = median_with_spread(values)
        held += ratio.low <= 1 <= ratio.high
        assert ratio.median == statistics.median(values)
    error = 3 * math.sqrt(0.95 * 0.05 / trials)
    assert held / trials > 0.95 - error


def test_the_spread_of_few_values_is_all_of_them() -> None:
    spread = median_with_spread([3.0, 1.0, 2.0])
    assert (spread.low, spread.median, spread.high) == (1.0, 2.0, 3.0)
    assert median_with_spread([5.0]).high == 5.0


def test_the_document_and_the_table_hold_every_row() -> None:
    rows = run_case("self", Case("sums", slow_and_fast, rounds=1, warmup=0))
    measured = json.loads(json.dumps(document(rows, "bench self")))
    needed = {
        "benchmark",
        "case",
        "variant",
        "baseline",
        "ratio",
        "ratio_low",
        "ratio_high",
        "bytes",
    }
    assert all(needed <= row.keys() for row in measured["rows"])
    assert measured["torch"] == torch.__version__
    assert measured["hardware"]["cores"] >= 1
    text = table(rows)
    assert all(row.variant in text for row in rows)
    assert "baseline" in text


def test_a_kept_run_is_named_by_date_and_hardware() -> None:
    used = {"backend": "cpu", "device": "x86_64", "cpu": "Fast (R) CPU @ 2.00GHz", "cores": 2}
    measured = {"date": "2031-05-06T07:08:09+00:00", "hardware": used}
    path = result_path(Path("results"), measured)
    assert path == Path("results/2031-05-06-fast-r-cpu-2-00ghz-2-cores.json")
    measured["hardware"] = {**used, "backend": "npu", "device": "Ascend910B"}
    assert result_path(Path(), measured) == Path("2031-05-06-ascend910b-2-cores.json")


def test_benchmarks_are_found_by_their_file_names(tmp_path: Path) -> None:
    for name in ("bench_two.py", "bench_one.py", "other.py"):
        (tmp_path / name).touch()
    assert chosen_names([], tmp_path) == ["one", "two"]
    assert chosen_names(["two", "two"], tmp_path) == ["two"]
    with pytest.raises(ConfigError, match="those that are there: one, two"):
        chosen_names(["three"], tmp_path)


def test_an_unknown_benchmark_is_refused_with_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["no-such-thing"]) == 2
    assert "there is no benchmark called 'no-such-thing'" in capsys.readouterr().err


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", chosen_names([]))
def test_every_benchmark_runs(name: str, tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks", name, "--quick", "--json", str(target)]
    subprocess.run(command, cwd=ROOT, check=True)
    rows = json.loads(target.read_text())["rows"]
    assert {row["benchmark"] for row in rows} == {name}
    assert all(row["ratio"] > 0 for row in rows)
