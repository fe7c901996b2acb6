"""Conditions on a plan, as data. Imports no torch.

[Note: three values]
A condition holds, does not hold, or is not known: `None`. Not known is what reads an option that
the plan does not name, an option of a feature that is off, and what compares things that cannot be
compared.
`Not` of the unknown is unknown; `All` is false as soon as one part is, and `AnyOf` true as soon as
one part is, whatever the others are (Kleene's logic). A rule speaks only where its condition is
known to hold: so a rule that *requires* something, whose condition is "on, and what it needs is
not", is silent where nobody said whether that is there. An exception is written with `Unless`,
which is never unknown: it stands for what would have been said.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, TypeGuard

from ascend_suite.plan import Plan
from ascend_suite.rule import Predicate
from ascend_suite.versions import Version

__all__ = ["All", "AnyOf", "Compare", "Not", "On", "Option", "Product", "Sum", "Unless"]


@dataclasses.dataclass(frozen=True)
class On:
    """The feature is on. A plan names every feature that is, so this is always known.

    Attributes:
        feature: Its name.
    """

    feature: str

    def holds(self, plan: Plan) -> bool | None:
        """Whether the plan has the feature."""
        return self.feature in plan.features

    def names(self) -> frozenset[str]:
        """The feature."""
        return frozenset({self.feature})

    def __str__(self) -> str:
        return f"{self.feature} is on"


@dataclasses.dataclass(frozen=True)
class Not:
    """The condition does not hold.

    Attributes:
        part: The condition.
    """

    part: Predicate

    def holds(self, plan: Plan) -> bool | None:
        """The opposite; unknown where the part is."""
        held = self.part.holds(plan)
        return None if held is None else not held

    def names(self) -> frozenset[str]:
        """Those of the part."""
        return self.part.names()

    def __str__(self) -> str:
        return f"{self.part.feature} is off" if isinstance(self.part, On) else f"not ({self.part})"


@dataclasses.dataclass(frozen=True)
class Unless:
    """Nobody says that the condition holds: for an exception to a rule.

    Attributes:
        part: The condition.
    """

    part: Predicate

    def holds(self, plan: Plan) -> bool | None:
        """True where the part does not hold, and where that is not known."""
        return self.part.holds(plan) is not True

    def names(self) -> frozenset[str]:
        """Those of the part."""
        return self.part.names()

    def __str__(self) -> str:
        return f"unless {self.part}" if isinstance(self.part, Compare) else f"unless ({self.part})"


class _Together:
    """What `All` and `AnyOf` share: parts, and a value of one part that decides."""

    parts: tuple[Predicate, ...]
    _decides: bool
    _word: str

    def __init__(self, *parts: Predicate) -> None:
        object.__setattr__(self, "parts", parts)

    def holds(self, plan: Plan) -> bool | None:
        """The value that decides where one part has it; else unknown where one part is."""
        held = [part.holds(plan) for part in self.parts]
        if self._decides in held:
            return self._decides
        return None if None in held else not self._decides

    def names(self) -> frozenset[str]:
        """Those of all parts."""
        return frozenset().union(*(part.names() for part in self.parts))

    def __str__(self) -> str:
        return f" {self._word} ".join(
            f"({part})"
            if isinstance(part, _Together) and type(part) is not type(self)
            else str(part)
            for part in self.parts
        )


@dataclasses.dataclass(frozen=True, init=False)
class All(_Together):
    """Every part holds.

    Attributes:
        parts: The conditions.
    """

    parts: tuple[Predicate, ...]
    _decides = False
    _word = "and"


@dataclasses.dataclass(frozen=True, init=False)
class AnyOf(_Together):
    """One part at least holds.

    Attributes:
        parts: The conditions.
    """

    parts: tuple[Predicate, ...]
    _decides = True
    _word = "or"


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"


_UNKNOWN: Final = _Unknown()


class _Term:
    """What has a value in a plan, and can be compared: an option, or a number made of some."""

    def value(self, plan: Plan) -> object:
        """What it is in the plan; `_UNKNOWN` where the plan does not say."""
        raise NotImplementedError

    def names(self) -> frozenset[str]:
        """The options that it reads."""
        raise NotImplementedError

    def equals(self, value: object) -> Compare:
        """It is `value`, and of its kind: 1 is not True."""
        return Compare(self, "is", value)

    def differs(self, value: object) -> Compare:
        """It is anything but `value`."""
        return Compare(self, "is not", value)

    def within(self, values: Iterable[object]) -> Compare:
        """It is one of `values`; where it is a list, each of its entries is."""
        return Compare(self, "is among", tuple(values))

    def outside(self, values: Iterable[object]) -> Compare:
        """It is none of `values`; where it is a list, one of its entries is none."""
        return Compare(self, "is not among", tuple(values))

    def holding(self, value: object) -> Compare:
        """It is a list that has `value`."""
        return Compare(self, "has", value)

    def lacking(self, value: object) -> Compare:
        """It is a list without `value`."""
        return Compare(self, "lacks", value)

    def sharing(self, values: object) -> Compare:
        """It is a list that has an entry in common with another list."""
        return Compare(self, "shares an entry with", values)

    def reaching_below(self, bound: object) -> Compare:
        """It is a list of numbers, one of which at least is below `bound`."""
        return Compare(self, "has an entry below", bound)

    def reaching(self, bound: object) -> Compare:
        """It is a list of numbers, one of which at least is `bound` or above it."""
        return Compare(self, "has an entry of at least", bound)

    def at_least(self, bound: object) -> Compare:
        """It is a number, not below `bound`."""
        return Compare(self, "is at least", bound)

    def more_than(self, bound: object) -> Compare:
        """It is a number above `bound`."""
        return Compare(self, "is more than", bound)

    def less_than(self, bound: object) -> Compare:
        """It is a number below `bound`."""
        return Compare(self, "is less than", bound)

    def divisible_by(self, divisor: object) -> Compare:
        """It is a multiple of `divisor`."""
        return Compare(self, "is a multiple of", divisor)

    def indivisible_by(self, divisor: object) -> Compare:
        """It is no multiple of `divisor`."""
        return Compare(self, "is no multiple of", divisor)

    def older_than(self, version: str) -> Compare:
        """It is a version from before `version`."""
        return Compare(self, "is older than", version)


@dataclasses.dataclass(frozen=True)
class Option(_Term):
    """An option.

    Attributes:
        name: `"feature.option"` or `"training.option"`.
    """

    name: str

    def value(self, plan: Plan) -> object:
        """What the plan says; unknown where it does not, and where the feature is off."""
        owner, _, option = self.name.partition(".")
        if owner == "training":
            return plan.training.get(option, _UNKNOWN)
        return getattr(plan.features.get(owner), option, _UNKNOWN)

    def names(self) -> frozenset[str]:
        """The option."""
        return frozenset({self.name})

    def __str__(self) -> str:
        return self.name.removeprefix("training.")


class _Arithmetic(_Term):
    parts: tuple[_Term | int, ...]
    _sign: str

    def __init__(self, *parts: _Term | int) -> None:
        object.__setattr__(self, "parts", parts)

    def value(self, plan: Plan) -> object:
        """The number; unknown where one part is, or is no number."""
        values = [part.value(plan) if isinstance(part, _Term) else part for part in self.parts]
        numbers = [value for value in values if _is_number(value)]
        return self._made(numbers) if len(numbers) == len(values) else _UNKNOWN

    def _made(self, numbers: Iterable[int | float]) -> int | float:
        raise NotImplementedError

    def names(self) -> frozenset[str]:
        """Those of all parts."""
        return frozenset().union(*(p.names() for p in self.parts if isinstance(p, _Term)))

    def __str__(self) -> str:
        return f" {self._sign} ".join(
            f"({part})" if isinstance(part, _Arithmetic) else str(part) for part in self.parts
        )


@dataclasses.dataclass(frozen=True, init=False)
class Sum(_Arithmetic):
    """The sum of options and numbers.

    Attributes:
        parts: What is added up.
    """

    parts: tuple[_Term | int, ...]
    _sign = "+"

    def _made(self, numbers: Iterable[int | float]) -> int | float:
        return sum(numbers)


@dataclasses.dataclass(frozen=True, init=False)
class Product(_Arithmetic):
    """The product of options and numbers.

    Attributes:
        parts: The factors.
    """

    parts: tuple[_Term | int, ...]
    _sign = "x"

    def _made(self, numbers: Iterable[int | float]) -> int | float:
        return math.prod(numbers)


@dataclasses.dataclass(frozen=True)
class Compare:
    """What a term is, compared with a value or another term.

    Attributes:
        left: The term.
        relation: How they compare, in the words in which it is printed.
        right: The value, or the other term.
    """

    left: _Term
    relation: str
    right: object

    def __post_init__(self) -> None:
        if self.relation not in _RELATIONS:
            raise ValueError(f"there is no relation {self.relation!r}.")

    def holds(self, plan: Plan) -> bool | None:
        """Whether it holds; None where a side is unknown, or they cannot be compared."""
        left = self.left.value(plan)
        right = self.right.value(plan) if isinstance(self.right, _Term) else self.right
        if left is _UNKNOWN or right is _UNKNOWN:
            return None
        return _RELATIONS[self.relation](left, right)

    def names(self) -> frozenset[str]:
        """Those of both sides."""
        right = self.right.names() if isinstance(self.right, _Term) else frozenset[str]()
        return self.left.names() | right

    def __str__(self) -> str:
        if self.right is None:
            return f"{self.left} {_OF_NONE.get(self.relation, self.relation)}"
        listed = ", ".join(map(str, self.right)) if isinstance(self.right, tuple) else self.right
        return f"{self.left} {self.relation} {'empty' if self.right == () else listed}"


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _equal(left: object, right: object) -> bool:
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _entries(value: object) -> Sequence[object] | None:
    """The entries of a list, which may be written as one text with commas; None for no list."""
    if isinstance(value, str):
        return [entry.strip() for entry in value.split(",")]
    return value if isinstance(value, Sequence) else None


def _among(left: object, right: object) -> bool | None:
    entries = [left] if isinstance(left, str) or not isinstance(left, Sequence) else left
    assert isinstance(right, tuple)
    return all(any(_equal(entry, known) for known in right) for entry in entries)


def _has(left: object, right: object) -> bool | None:
    entries = _entries(left)
    return None if entries is None else right in entries


def _share(left: object, right: object) -> bool | None:
    ours, theirs = _entries(left), _entries(right)
    return None if ours is None or theirs is None else any(entry in theirs for entry in ours)


def _has_entry(
    compare: Callable[[Any, Any], bool],
) -> Callable[[object, object], bool | None]:
    def of(left: object, right: object) -> bool | None:
        entries = _entries(left)
        if entries is None or not _is_number(right):
            return None
        return any(_is_number(entry) and compare(entry, right) for entry in entries)

    return of


def _ordered(compare: Callable[[Any, Any], bool]) -> Callable[[object, object], bool | None]:
    def of(left: object, right: object) -> bool | None:
        return compare(left, right) if _is_number(left) and _is_number(right) else None

    return of


def _multiple(left: object, right: object) -> bool | None:
    if isinstance(left, int) and isinstance(right, int) and _is_number(left) and right > 0:
        return left % right == 0
    return None


def _older(left: object, right: object) -> bool | None:
    versions = Version.of(left), Version.of(right)
    return None if versions[0] is None or versions[1] is None else versions[0] < versions[1]


def _opposite(
    relation: Callable[[object, object], bool | None],
) -> Callable[[object, object], bool | None]:
    def of(left: object, right: object) -> bool | None:
        held = relation(left, right)
        return None if held is None else not held

    return of


_OF_NONE = {"is": "is not set", "is not": "is set"}
_RELATIONS: Mapping[str, Callable[[object, object], bool | None]] = {
    "is": _equal,
    "is not": _opposite(_equal),
    "is among": _among,
    "is not among": _opposite(_among),
    "has": _has,
    "lacks": _opposite(_has),
    "shares an entry with": _share,
    "has an entry below": _has_entry(operator.lt),
    "has an entry of at least": _has_entry(operator.ge),
    "is at least": _ordered(operator.ge),
    "is more than": _ordered(operator.gt),
    "is less than": _ordered(operator.lt),
    "is a multiple of": _multiple,
    "is no multiple of": _opposite(_multiple),
    "is older than": _older,
}
