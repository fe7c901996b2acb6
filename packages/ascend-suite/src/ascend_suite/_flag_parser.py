"""A command line as arguments. Imports no torch.

Not `argparse`, which stops at the first fault, and knows nothing of flags that are nearly right.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from ascend_suite._kinds import fits, in_words, meant_by, words_of
from ascend_suite._suggestion import nearest
from ascend_suite._tokens import flags_of
from ascend_suite.finding import Finding, Severity
from ascend_suite.flags import FEATURE_FLAGS
from ascend_suite.vocabulary import VOCABULARY

__all__ = ["FlagParser"]

# How alike an unknown flag must be to a known one, to be called a mistake. Most flags of a training
# script are read by nobody here, and are to be left alone: a test lists those that are most alike.
_ALIKE = 0.87


@dataclasses.dataclass(frozen=True)
class _Argument:
    """What a flag gives.

    Attributes:
        attribute: Its name among parsed arguments.
        type: Of its value; None where nothing follows the flag.
        value: What it gives then.
    """

    attribute: str
    type: Any = None
    value: object = None


class FlagParser:
    """Reads flags, and collects what is wrong with them.

    Attributes:
        found: All findings so far.
    """

    def __init__(self) -> None:
        self.found: list[Finding] = []
        self._known = dict(_arguments())
        self._features = [name for row in FEATURE_FLAGS for name in (row.flag, *row.aliases)]

    def parse(self, argv: Sequence[str] | str) -> dict[str, object]:
        """Return what the flags give, by the name of the argument.

        Args:
            argv: The flags, or a command line of them. The last counts of those given twice.
        """
        given: dict[str, object] = {}
        for flag, words in self._split(argv):
            if not flag:
                self._before_flags(words)
                continue
            argument = self._known.get(flag)
            if argument is None:
                self._unknown(flag)
                continue
            value = self._value(flag, argument, words)
            if value is None:
                continue
            if argument.attribute in given and given[argument.attribute] != value:
                self._note(
                    Severity.WARNING,
                    flag,
                    f"{flag} is given twice.",
                    f"{value!r} counts, and {given[argument.attribute]!r} does not.",
                    "leave one of them out.",
                )
            given[argument.attribute] = value
        return given

    def _split(self, argv: Sequence[str] | str) -> list[tuple[str, list[str]]]:
        try:
            return list(flags_of(argv))
        except ValueError:
            what = "the command line holds a quotation that does not end."
            why = "where its words begin and end is not known then."
            self._note(Severity.ERROR, "flags", what, why, "close it, or give a list of words.")
            return []

    def _before_flags(self, words: Sequence[str]) -> None:
        """Leave the name of a script alone, and not what a shell would put flags in place of."""
        for word in words:
            if word[:1] in ("$", "@"):
                what = f"{word} is read as it is written."
                why = "a shell or a parser would put flags in its place, and these are not known."
                self._note(Severity.WARNING, "flags", what, why, "write the flags themselves.")

    def _value(self, flag: str, argument: _Argument, words: list[str]) -> object | None:
        if argument.type is None:
            if not words:
                return argument.value
            self._wrong(flag, words, "nothing", f"write {flag} alone.")
            return None
        kind, takes = argument.type, in_words(argument.type, none=False)
        if len(words) != 1 and not fits(words, kind):
            self._wrong(flag, words, takes, f"write {flag} with one value.")
            return None
        value = meant_by(words[0], kind) if len(words) == 1 else None
        if value is None and fits(words, kind):
            return words
        if value is None:
            near = nearest(words[0], words_of(kind))
            instead = f"write {takes}." if near is None else f"did you mean {near!r}?"
            self._wrong(flag, words, takes, instead)
        return value

    def _wrong(self, flag: str, words: list[str], takes: str, instead: str) -> None:
        given = " ".join(words) or "nothing"
        what = f"{flag} is given {given}."
        self._note(Severity.ERROR, flag, what, f"it takes {takes}.", instead)

    def _unknown(self, flag: str) -> None:
        """Leave a flag alone that others may read, and not one that is misspelt."""
        for names, severity in (
            (self._features, Severity.ERROR),
            (self._known, Severity.WARNING),
        ):
            instead = self._meant(flag, names)
            if instead is not None:
                what = f"there is no flag {flag} that is known here."
                self._note(severity, flag, what, "it looks like one that is.", instead)
                return

    def _meant(self, flag: str, names: Collection[str]) -> str | None:
        """What to write instead of an unknown flag; None where none of the names was meant."""
        bare = _bare(flag)
        if bare in _ON_WITHOUT and _ON_WITHOUT[bare] in names:
            return f"leave it out: that is so without {_ON_WITHOUT[bare]}."
        if bare.startswith("no-") and f"--{bare.removeprefix('no-')}" in self._features:
            return f"leave --{bare.removeprefix('no-')} out: it is off without."
        if bare in _BY_NAME and _BY_NAME[bare] in names:
            return f"did you mean {_BY_NAME[bare]}?"
        near = nearest(flag, names, cutoff=_ALIKE, within=False) or self._begun(flag)
        return None if near is None else f"did you mean {near}?"

    def _begun(self, flag: str) -> str | None:
        """The feature's flag that another one is the beginning of, as `argparse` may take it."""
        begun = [name for name in self._features if "-" in _bare(flag) and name.startswith(flag)]
        return min(begun, key=len, default=None)

    def _note(self, severity: Severity, flag: str, what: str, why: str, instead: str) -> None:
        self.found.append(Finding(severity, flag, what, why, instead))


def _bare(flag: str) -> str:
    return flag.lstrip("-").lower().replace("_", "-")


_OF_SCRIPTS = tuple(option for option in VOCABULARY.values() if option.origin != "fact")
_ON_WITHOUT = {
    _bare(option.off).removeprefix("no-").replace("disable-", "enable-"): option.off
    for option in _OF_SCRIPTS
    if option.off is not None
}
"""Flags that turn off what is on without them, by the name of a flag that would turn it on."""
_BY_NAME = {
    _bare(name): option.flag
    for option in _OF_SCRIPTS
    if option.flag is not None
    for name in (option.name, option.attribute)
    if f"--{_bare(name)}" != option.flag
}
"""The flag of an option whose flag is not called what the option is."""


def _arguments() -> Iterator[tuple[str, _Argument]]:
    for option in VOCABULARY.values():
        if option.off is not None:
            yield option.off, _Argument(option.attribute, value=False)
        elif option.flag is not None:
            switch = fits(True, option.type)
            kind = None if switch else option.type
            yield option.flag, _Argument(option.attribute, kind, True if switch else None)
    for row in FEATURE_FLAGS:
        for flag in (row.flag, *row.aliases):
            yield flag, _Argument(row.attribute, row.type, True if row.is_switch else None)
