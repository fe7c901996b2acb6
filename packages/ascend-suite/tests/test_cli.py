from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import ascend_core
import ascend_suite
from ascend_suite.cli import main

TINY = ["demo", "--layers=1", "--hidden=32", "--seq=32", "--batch=4", "--steps=6", "--device=cpu"]
PNG = b"\x89PNG\r\n\x1a\n"


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert isinstance(caught.value.code, int)
    return caught.value.code


@pytest.fixture
def install(tmp_path: Path, features: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install the features of `suite_test_features` as a package would, in place of all others."""
    info = tmp_path / "site" / "suite_test_features-0.1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Name: suite-test-features\nVersion: 0.1\n")
    lines = [f"{name} = suite_test_features:{name.upper()}" for name in ("honest", "wrong")]
    (info / "entry_points.txt").write_text("\n".join(["[ascend.features]", *lines]))
    monkeypatch.syspath_prepend(str(info.parent))
    return info.parent


def test_the_demo_prints_one_table_and_writes_picture_and_figures(
    install: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = tmp_path / "new" / "demo.json"
    arguments = [*TINY, "--features", "honest", "--out", str(tmp_path / "out")]
    assert exit_code(*arguments, "--json", str(figures)) == 0
    printed = capsys.readouterr().out
    rows = [line.split() for line in printed.splitlines()]
    [plain] = [row for row in rows if row[:1] == ["plain"]]
    [honest] = [row for row in rows if row[:1] == ["honest"]]
    assert plain[3:] == ["–", "1.00", "x", "yes", plain[-1]]
    assert honest[-2] == "yes" and honest[-1] == plain[-1]
    head = {word for row in rows[: rows.index(plain)] for word in row}
    assert head >= {"Feature", "Peak", "memory", "Memory", "saved", "Step-time", "ratio"}
    assert head >= {"Loss", "identical", "to", "the", "bit", "Final", "loss"}
    assert (tmp_path / "out" / "demo.png").read_bytes().startswith(PNG)
    runs = json.loads(figures.read_text())["runs"]
    assert [run["feature"] for run in runs] == ["plain", "honest"]
    for run in runs:
        assert isinstance(run["peak_bytes"], int) and isinstance(run["saved_bytes"], int)
        assert run["bitwise_equal"] is True and run["step_time_ratio"] > 0
        assert f"{run['final_loss']:.4f}" == plain[-1]


def test_on_a_cpu_it_says_that_moving_to_the_host_saves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*TINY, "--features", "swap-optimizer", "--out", str(tmp_path)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "swap-optimizer: moves memory to the host." in printed


def test_what_works_on_bf16_alone_is_compared_with_bf16(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(*TINY, "--features", "reuse-fp32-param", "--out", str(tmp_path)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "reuse-fp32-param: compared with plain bf16, BF16 weights with FP32 masters" in printed


def test_a_feature_that_breaks_its_promise_ends_in_no_and_exit_code_1(
    install: Path, tmp_path: Path
) -> None:
    here = str(Path(__file__).parent)
    path = os.pathsep.join([str(install), here, *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "ascend_suite", *TINY, "--features", "wrong", "--out", tmp_path],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    [wrong] = [row for line in done.stdout.splitlines() if (row := line.split())[:1] == ["wrong"]]
    assert wrong[-2] == "no"
    assert "Failed: wrong promises the plain run's bits, but the loss of step 2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "layers is 0"),
        (["--layers", "many"], "--layers"),
        (["--hidden", "100"], "multiple of 32, such as 96"),
        (["--seq", "0"], "seq is 0"),
        (["--seq", "99999999"], "too short for sequences of 99999999"),
        (["--batch", "-1"], "batch is -1"),
        (["--steps", "1"], "steps is 1"),
        (["--seed", "-5"], "seed is -5"),
        (["--dropout", "1"], "dropout is 1.0"),
        (["--activation", "relu"], "--activation"),
        (["--norm", "batch"], "--norm"),
        (["--features", "nosuch"], "there is no feature called 'nosuch'"),
        (["--features", "honest,,wrong"], "a feature that has no name"),
        (["--features", ""], "a feature that has no name"),
        (["--device", "tpu"], "the backends are: npu, cuda, cpu"),
        (["--out", __file__], f"{Path(__file__).name}/demo.png cannot be written"),
        (["--json", str(Path(__file__).parent)], "cannot be written"),
        (["--nosuch"], "No such option"),
    ],
    ids=" ".join,
)
def test_a_bad_value_is_a_clear_error(
    install: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    assert exit_code("demo", *arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == "" and "Traceback" not in captured.err
    assert not list(tmp_path.glob("demo.*")), "nothing was trained"


def test_help_says_what_is_measured_and_what_the_exit_codes_mean(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_code("demo", "--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Peak memory is the most that was in use at once" in text
    assert (
        "Exit code 0: all is well, also when plain is out of memory and a feature is not." in text
    )


def test_the_command_line_answers_without_torch() -> None:
    code = (
        "import sys\n"
        "from ascend_suite.cli import main\n"
        "try: main(['demo', '--layers', '0'])\n"
        "except SystemExit as end: sys.exit(10 * end.code + ('torch' in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 20


def test_without_the_extra_one_error_says_how_to_get_it() -> None:
    sources = [str(Path(m.__file__ or "").parents[1]) for m in (ascend_core, ascend_suite)]
    code = (
        f"import sys; sys.path[:0] = {sources}; sys.argv = ['ascend-suite', 'demo']\n"
        "from ascend_suite.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr == (
        "UnavailableError: the command line of ascend-suite is not installed.\n"
        "  why      it needs typer, rich, matplotlib, which the extra 'cli' brings.\n"
        "  instead  pip install 'ascend-suite[cli]'\n"
    )
