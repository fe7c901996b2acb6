"""Why two things do or do not go together. Imports no torch.

[Note: what a pair is]
A rule is about two features, or about a feature and an option of training, when its condition reads
both, and may hold where both are there. A rule that one of them *requires* the other is about them,
too. Whether a rule speaks may depend on options: one that reads features alone speaks for every
plan that has both, and any other for some plans.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import functools
import itertools
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ascend_core.errors import ConfigError
from ascend_core.feature import discover
from ascend_suite._order import ORDER
from ascend_suite._tokens import attribute_of
from ascend_suite.finding import Severity
from ascend_suite.flags import FEATURE_FLAGS
from ascend_suite.plan import Plan
from ascend_suite.rule import Rule
from ascend_suite.rules import RULES
from ascend_suite.vocabulary import VOCABULARY

__all__ = ["Kind", "Verdict", "explain", "pairs"]


class Kind(enum.StrEnum):
    """How two things go together."""

    TOGETHER = "together"
    """No rule refuses them, whatever the options are."""
    NEEDS = "needs"
    """They go together with some options, and not with others."""
    ALLOWED = "allowed"
    """They are refused by default, and work: the plan has to allow the rule."""
    REFUSED = "refused"
    """They cannot be used together."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What there is to say about two things.

    Attributes:
        first: A feature.
        second: Another feature, or an option of training.
        kind: How they go together.
        rules: The rules about both, in the order of the table; warnings and notes, too.
        order: The features among the two, in the order in which they are turned on.
    """

    first: str
    second: str
    kind: Kind
    rules: tuple[Rule, ...]
    order: tuple[str, ...]

    def __str__(self) -> str:
        return "\n".join((_SENTENCES[self.kind].format(self), *map(_lines, self.rules)))

    def as_json(self) -> dict[str, object]:
        """Return the verdict as JSON values."""
        return {
            "first": self.first,
            "second": self.second,
            "kind": str(self.kind),
            "order": list(self.order),
            "rules": [rule.as_json() for rule in self.rules],
        }


_SENTENCES = {
    Kind.TOGETHER: "{0.first} and {0.second} go together.",
    Kind.NEEDS: "{0.first} and {0.second} go together with the right options.",
    Kind.ALLOWED: "{0.first} and {0.second} are refused together, unless the plan allows it.",
    Kind.REFUSED: "{0.first} and {0.second} cannot be used together.",
}


def explain(first: str, second: str, *, rules: Sequence[Rule] = RULES) -> Verdict:
    """Say whether a feature and another feature, or an option of training, go together, and why.

    Args:
        first: The name of one.
        second: That of the other.
        rules: The table; all rules of the suite when left out.

    Raises:
        ConfigError: When there is nothing of such a name, neither is a feature, or both are one.
    """
    names = [_known(name) for name in (first, second)]
    if not any(name in features() for name in names):
        raise ConfigError(
            f"neither {first} nor {second} is a feature.",
            why="options of training are explained beside a feature.",
            instead=f"name one of {', '.join(sorted(features()))}.",
        )
    if names[0] == names[1]:
        raise ConfigError(
            f"{names[0]} was named twice.",
            why="what is explained is how two things go together.",
            instead=f"name a second one; `ascend-suite features {names[0]}` tells of the feature.",
        )
    about = tuple(rule for rule in rules if _is_about(rule, names))
    order = tuple(sorted(filter(features().__contains__, names), key=_place))
    return Verdict(names[0], names[1], _kind(about, names), about, order)


def pairs(*, rules: Sequence[Rule] = RULES) -> Mapping[frozenset[str], Verdict]:
    """The verdict on every pair of features that are installed."""
    return MappingProxyType(
        {
            frozenset(pair): explain(*pair, rules=rules)
            for pair in itertools.combinations(sorted(features()), 2)
        }
    )


@functools.cache
def features() -> frozenset[str]:
    """The features that a plan may have."""
    return frozenset(discover())


def _known(name: str) -> str:
    wanted = name.removeprefix("training.").lower()
    known = {*features(), *VOCABULARY}
    bare = attribute_of(wanted)
    for found in (wanted, bare.replace("_", "-"), bare, _by_flag().get(bare)):
        if found in known:
            return str(found)
    near = difflib.get_close_matches(wanted, known, n=3)
    raise ConfigError(
        f"there is no feature and no option called {name!r}.",
        instead=f"did you mean {' or '.join(near)}?"
        if near
        else f"features are {', '.join(sorted(features()))}.",
    )


def _by_flag() -> dict[str, str]:
    """What the flags and arguments of training scripts give, where they have names of their own."""
    flags: dict[str | None, str] = {}
    for option in VOCABULARY.values():
        flags |= dict.fromkeys((option.flag, option.off, option.argument), option.name)
    for row in FEATURE_FLAGS:
        if row.framework is None:
            flags |= dict.fromkeys((row.flag, *row.aliases), row.feature)
    return {attribute_of(flag): name for flag, name in flags.items() if flag}


def _is_about(rule: Rule, names: Sequence[str]) -> bool:
    if not all(_reads(rule, name) for name in names):
        return False
    # What is not known of a plan with both leaves the rule open; only its features may rule it out.
    both = Plan({name: None for name in names if name in features()})
    return rule.relation == "requires" or rule.fires_when.holds(both) is not False


def _reads(rule: Rule, name: str) -> bool:
    read = rule.fires_when.names()
    if name in features():
        return any(each.partition(".")[0] == name for each in read)
    return f"training.{name}" in read


def _kind(rules: Sequence[Rule], names: Sequence[str]) -> Kind:
    errors = [rule for rule in rules if rule.severity is Severity.ERROR]
    always = [rule for rule in errors if not _depends(rule, names)]
    if not errors:
        return Kind.TOGETHER
    if not always or all(rule.relation == "requires" for rule in always):
        return Kind.NEEDS
    return Kind.REFUSED if any(rule.proof is None for rule in always) else Kind.ALLOWED


def _depends(rule: Rule, names: Sequence[str]) -> bool:
    """Whether the rule speaks for some options of features alone, or of training beside names."""
    of_training = all(name in features() for name in names)
    options = {name for name in rule.fires_when.names() if "." in name}
    return any(of_training or not name.startswith("training.") for name in options)


def _place(feature: str) -> int:
    places = [place.feature for place in ORDER]
    return places.index(feature) if feature in places else len(places)


def _lines(rule: Rule) -> str:
    lines = [f"{rule.severity} {rule.id}: {rule.what}", f"  when     {rule.fires_when}"]
    lines += [f"  why      {rule.because}", f"  instead  {rule.instead}"]
    if rule.proof is not None:
        lines.append(f"  allow    allow = [{rule.id!r}]; {rule.proof} shows that it works")
    return "\n".join(lines)
