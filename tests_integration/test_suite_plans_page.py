"""The page of plans shows what really comes of the files that it shows."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

from ascend_suite import IncompatiblePlanError, Plan, read_plan

PAGE = (Path(__file__).resolve().parents[1] / "docs/plans.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_forms_of_a_plan_are_the_same_plan() -> None:
    good, _ = blocks("toml")
    [alike] = blocks("yaml")
    plan = Plan.from_mapping(tomllib.loads(good))
    assert plan.to_toml() == good
    assert Plan.from_mapping(yaml.safe_load(alike)) == plan


def test_the_messages_are_those_that_are_shown() -> None:
    _, wrong = blocks("toml")
    [shown] = blocks("text")
    _, found = read_plan(tomllib.loads(wrong))
    said = str(IncompatiblePlanError(found)) + "\n"
    pattern = re.escape(shown).replace("…", ".*")
    assert re.fullmatch(pattern, said)
