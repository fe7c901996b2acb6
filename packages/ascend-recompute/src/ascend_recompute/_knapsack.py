"""The cheapest set of options that saves enough bytes. Pure arithmetic: imports no torch.

[Note: two ways]
Of each group at most one option is taken. The groups are split into two halves; of each half all
sets are listed that no other set beats in both bytes and seconds (its front), and the two fronts
are walked against each other. That is exact, and a half of 15 groups with one option each has
2**15 sets at most. More groups have short fronts too where they are alike, as layers are. Where a
front still grows too long, the groups are relaxed: a part of an option may be taken. The relaxed
problem is solved exactly by taking steps along each group's lower convex hull in the order of
seconds per byte; its value is a lower bound, and only the last step is cut. Taking that one whole
costs less than one step more than the bound, and so than the optimum (Sinha and Zoltners, "The
multiple-choice knapsack problem", 1979).
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

__all__ = ["Choice", "Option", "choose"]

MOST_SETS = 2**18
"""So many sets are looked at in one half of the groups."""

Group = Sequence["Option"]


class Option(NamedTuple):
    """One thing that can be done.

    Attributes:
        nbytes: What it saves; above 0.
        seconds: What it costs; not below 0.
    """

    nbytes: int
    seconds: float

    def and_also(self, other: Option) -> Option:
        """Both of them as one."""
        return Option(self.nbytes + other.nbytes, self.seconds + other.seconds)


class Choice(NamedTuple):
    """What to take.

    Attributes:
        taken: For each group the position of the option that is taken, or None.
        nbytes: What they save together.
        seconds: What they cost together.
        at_least: No set that saves enough costs less seconds than this.
        exact: Whether no cheaper set saves enough.
    """

    taken: tuple[int | None, ...]
    nbytes: int
    seconds: float
    at_least: float
    exact: bool


class _Set(NamedTuple):
    """Options of some groups.

    Attributes:
        nbytes: What they save, cut off at what is wanted.
        seconds: What they cost.
        taken: The options: a pair of those of the groups before and that of the last group.
    """

    nbytes: int
    seconds: float
    taken: Any


class _Step(NamedTuple):
    """From one option of a group (or none) to one that saves more.

    Attributes:
        seconds_per_byte: The slope.
        group: The number of the group.
        option: The option that it leads to.
        nbytes: What it saves more.
        seconds: What it costs more.
    """

    seconds_per_byte: float
    group: int
    option: int
    nbytes: int
    seconds: float


def choose(groups: Sequence[Group], nbytes: int, *, most_sets: int = MOST_SETS) -> Choice | None:
    """Choose at most one option of each group, so that enough is saved at the least cost.

    Args:
        groups: The options.
        nbytes: How many bytes must be saved.
        most_sets: So many sets are looked at in each half of the groups; where they do not do,
            the choice is not exact, but less than one option dearer than the best.

    Returns:
        The choice; None when all of them together do not save enough.
    """
    if nbytes <= 0:
        return Choice((None,) * len(groups), 0, 0.0, 0.0, exact=True)
    if sum(max((option.nbytes for option in group), default=0) for group in groups) < nbytes:
        return None
    choice = _exact(groups, nbytes, most_sets) or _greedy(groups, nbytes)
    return choice._replace(taken=_in_order(groups, choice.taken))


def _in_order(groups: Sequence[Group], taken: tuple[int | None, ...]) -> tuple[int | None, ...]:
    """The same, with the first of equal groups taking what saves most; for people to read."""
    equal: dict[tuple[Option, ...], list[int]] = {}
    for number, group in enumerate(groups):
        equal.setdefault(tuple(group), []).append(number)
    ordered = list(taken)
    for group, numbers in equal.items():
        places = [taken[number] for number in numbers]
        places.sort(key=lambda place: -1 if place is None else group[place].nbytes)
        for number, place in zip(numbers, reversed(places), strict=True):
            ordered[number] = place
    return tuple(ordered)


# Exact -------------------------------------------------------------------------------------------


def _exact(groups: Sequence[Group], nbytes: int, most_sets: int) -> Choice | None:
    order = sorted(range(len(groups)), key=lambda number: -len(groups[number]))
    halves = order[::2], order[1::2]
    left = _front([groups[number] for number in halves[0]], nbytes, most_sets)
    if left is None:
        return None
    right = _front([groups[number] for number in halves[1]], nbytes, most_sets)
    if right is None:
        return None
    sizes = [one.nbytes for one in right]
    pairs = []
    for one in left:
        # The first that is large enough is the cheapest: a front rises in bytes and seconds.
        place = bisect.bisect_left(sizes, nbytes - one.nbytes)
        if place < len(right):
            pairs.append((one.seconds + right[place].seconds, one.taken, right[place].taken))
    _, *ends = min(pairs, key=operator.itemgetter(0))
    taken: list[int | None] = [None] * len(groups)
    for half, end in zip(halves, ends, strict=True):
        rest = end
        for number in reversed(half):
            rest, taken[number] = rest
    saved, seconds = _total(groups, taken)
    return Choice(tuple(taken), saved, seconds, seconds, exact=True)


def _front(groups: Sequence[Group], nbytes: int, most_sets: int) -> list[_Set] | None:
    """The sets that no other one beats, in the order of bytes; None when they are too many."""
    front, looked_at = [_Set(0, 0.0, None)], 0
    for group in groups:
        looked_at += len(front) * (len(group) + 1)
        if looked_at > most_sets:
            return None
        grown = [one._replace(taken=(one.taken, None)) for one in front]
        for (place, option), one in itertools.product(enumerate(group), front):
            size = min(one.nbytes + option.nbytes, nbytes)
            grown.append(_Set(size, one.seconds + option.seconds, (one.taken, place)))
        front = _unbeaten(grown)
    return front


def _unbeaten(sets: list[_Set]) -> list[_Set]:
    sets.sort(key=lambda one: (one.seconds, -one.nbytes))
    kept = sets[:1]
    for one in sets:
        if one.nbytes > kept[-1].nbytes:
            kept.append(one)
    return kept


# Greedy ------------------------------------------------------------------------------------------


def _greedy(groups: Sequence[Group], nbytes: int) -> Choice:
    taken: list[int | None] = [None] * len(groups)
    missing, seconds = nbytes, 0.0
    for step in sorted(itertools.chain.from_iterable(map(_steps, itertools.count(), groups))):
        if step.nbytes >= missing:
            break
        taken[step.group] = step.option
        missing -= step.nbytes
        seconds += step.seconds
    at_least = seconds + step.seconds_per_byte * missing
    number, place = _cheapest_change(groups, taken, missing)
    taken[number] = place
    _do_without(groups, taken, nbytes)
    return Choice(tuple(taken), *_total(groups, taken), at_least, exact=False)


def _steps(number: int, group: Group) -> list[_Step]:
    """The lower convex hull of a group's options, from taking none to the largest."""
    steps: list[_Step] = []
    for place in sorted(range(len(group)), key=lambda place: (group[place], place)):
        step = _step(number, group, steps, place)
        while steps and step.nbytes > 0 and step.seconds_per_byte <= steps[-1].seconds_per_byte:
            steps.pop()
            step = _step(number, group, steps, place)
        if step.nbytes > 0:
            steps.append(step)
    return steps


def _step(number: int, group: Group, before: list[_Step], place: int) -> _Step:
    start = group[before[-1].option] if before else Option(0, 0.0)
    size, seconds = group[place].nbytes - start.nbytes, group[place].seconds - start.seconds
    slope = seconds / size if size > 0 else 0.0
    return _Step(slope, number, place, size, seconds)


def _cheapest_change(
    groups: Sequence[Group], taken: Sequence[int | None], missing: int
) -> tuple[int, int]:
    """The group and the option that save what is missing at the least more seconds."""
    changes = [
        (option.seconds - now.seconds, number, place)
        for number, (group, now) in enumerate(zip(groups, _now(groups, taken), strict=True))
        for place, option in enumerate(group)
        if option.nbytes - now.nbytes >= missing
    ]
    _, number, place = min(changes)
    return number, place


def _do_without(groups: Sequence[Group], taken: list[int | None], nbytes: int) -> None:
    """Take less where there is enough without it, the dearest group first."""
    now = _now(groups, taken)
    spare = sum(option.nbytes for option in now) - nbytes
    for number in sorted(range(len(groups)), key=lambda number: -now[number].seconds):
        lesser = [(Option(0, 0.0), None), *zip(groups[number], itertools.count(), strict=False)]
        fitting = [one for one in lesser if now[number].nbytes - one[0].nbytes <= spare]
        option, place = min(fitting, key=lambda one: one[0].seconds)
        if option.seconds < now[number].seconds:
            taken[number] = place
            spare -= now[number].nbytes - option.nbytes


def _now(groups: Sequence[Group], taken: Iterable[int | None]) -> list[Option]:
    return [
        Option(0, 0.0) if place is None else group[place]
        for group, place in zip(groups, taken, strict=True)
    ]


def _total(groups: Sequence[Group], taken: Iterable[int | None]) -> Option:
    now = _now(groups, taken)
    return Option(sum(option.nbytes for option in now), sum(option.seconds for option in now))
