"""Plans in files of TOML, YAML and JSON."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from ascend_core.errors import UnavailableError
from ascend_suite import Plan, read_plan
from ascend_swap import SwapOptimizerConfig

TOML = 'allow = ["a"]\n[training]\nbf16 = true\n[swap-optimizer]\nmaster_weights = true\n'
YAML = "allow: [a]\ntraining:\n  bf16: true\nswap-optimizer:\n  master_weights: true\n"
JSON = json.dumps(
    {"allow": ["a"], "training": {"bf16": True}, "swap-optimizer": {"master_weights": True}}
)
EXPECTED = Plan.of(SwapOptimizerConfig(master_weights=True), training={"bf16": True}, allow=["a"])


def fault(path: Path) -> str:
    plan, found = read_plan(path)
    assert plan == Plan()
    [finding] = found
    assert finding.subject == path.name
    return f"{finding.what} {finding.why}"


@pytest.mark.parametrize(
    ("name", "text"),
    [("p.toml", TOML), ("p.yaml", YAML), ("p.yml", YAML), ("p.json", JSON), ("P.TOML", TOML)],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_plan_is_read_from_a_file(tmp_path: Path, name: str, text: str, mark: str) -> None:
    path = tmp_path / name
    path.write_text(mark + text, encoding="utf-8")
    assert Plan.from_file(path) == Plan.from_file(str(path)) == EXPECTED


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(EXPECTED.to_toml(), encoding="utf-8")
    assert Plan.from_file(tmp_path / "p.toml") == EXPECTED


def test_an_empty_file_is_an_empty_plan(tmp_path: Path) -> None:
    for name in ("p.toml", "p.yaml"):
        (tmp_path / name).write_text("", encoding="utf-8")
        assert Plan.from_file(tmp_path / name) == Plan()


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("p.toml", "a = [", "cannot be read"),
        ("p.toml", "allow = []\nallow = []", "cannot be read"),
        ("p.yaml", "a: [", "cannot be read"),
        ("p.json", "{", "cannot be read"),
        ("p.json", "[]", "holds a list"),
        ("p.yaml", "- a", "holds a list"),
        ("p.yaml", "2026-11-30", "holds a single value"),
        ("p.json", '"swap-optimizer"', "holds a text"),
        ("p.toml", f"a = {'[' * 4000}{']' * 4000}", "cannot be read"),
        ("p.json", "[" * 99_999 + "]" * 99_999, "cannot be read"),
        ("p.yaml", "allow: []\nallow: []", "gives 'allow' twice"),
        ("p.yaml", "training:\n  bf16: true\n  bf16: false\nallow: []", "gives 'bf16' twice"),
        ("p.json", '{"allow": [], "allow": []}', "gives 'allow' twice"),
        ("p.ini", "", "has no ending that is known"),
        ("plan", "", "has no ending that is known"),
    ],
)
def test_a_file_that_cannot_be_right_is_a_finding(
    tmp_path: Path, name: str, text: str, what: str
) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    plan, found = read_plan(path)
    assert not plan.features
    assert [what in finding.what for finding in found] == [True]


def test_tables_that_are_left_empty_are_empty(tmp_path: Path) -> None:
    (tmp_path / "p.yaml").write_text("training:\nallow:\nswap-optimizer:\n", encoding="utf-8")
    assert Plan.from_file(tmp_path / "p.yaml") == Plan.of(SwapOptimizerConfig())


def test_a_file_that_is_not_there_or_no_text_is_a_finding(tmp_path: Path) -> None:
    assert "No such file" in fault(tmp_path / "p.toml")
    (tmp_path / "q.toml").write_bytes(b"\xff")
    assert "cannot be read" in fault(tmp_path / "q.toml")


def test_without_pyyaml_yaml_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.yaml").write_text(YAML, encoding="utf-8")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "yaml" else found(name)
    )
    with pytest.raises(UnavailableError, match=r"pip install 'ascend-suite\[yaml\]'"):
        Plan.from_file(tmp_path / "p.yaml")
