"""What a sharded optimizer keeps, as a checkpoint has it: whole, or this rank's part alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

from torch import Tensor, optim

from ascend_core.errors import ConfigError
from ascend_core.optim.checks import check_form, check_options
from ascend_core.optim.rules import Rule
from ascend_ddp._checkpoint import State, consolidated, cut
from ascend_ddp._inner import options_of
from ascend_ddp._owned import Chunk, Owned, owned_of

__all__ = ["KeptState"]


class KeptState:
    """The state of the optimizer that steps the parts, by the groups of whole parameters.

    Args:
        groups: Of whole parameters, live: loading writes their options.
        inner: Steps the parts; its groups are those of the parts.
        chunks: The model.
        rule: What the optimizer keeps.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        inner: optim.Optimizer,
        chunks: Sequence[Chunk],
        rule: Rule,
    ) -> None:
        self._groups = groups
        self._inner = inner
        self._chunks = chunks
        self._rule = rule
        self._owned = owned_of(chunks)

    def by_parameter(self) -> defaultdict[Tensor, State]:
        """What this rank keeps, by the model's parameter: of its own part, [elements], live."""
        found: defaultdict[Tensor, State] = defaultdict(dict)
        kept = self._inner.state
        for owned in self._owned.values():
            if owned.part in kept:
                found[owned.whole] = kept[owned.part]
        return found

    def whole(self) -> dict[str, Any]:
        """That of all ranks, in the form of the optimizer that was sharded. A collective."""
        groups, numbers = self._packed()
        options = self._options()
        states = {id(whole): state for whole, state in self.by_parameter().items()}
        found: dict[int, State] = {}
        for chunk in self._chunks:
            found.update(consolidated(chunk, states, lambda key: self._scalars(options[key])))
        state = {numbers[key]: found[key] for key in numbers if key in found}
        return {"state": state, "param_groups": groups}

    def local(self) -> dict[str, Any]:
        """That of this rank alone, live; see `ShardedOptimizer.local_state_dict`."""
        groups, numbers = self._packed()
        options, kept = self._options(), self._inner.state
        state = {
            numbers[key]: {
                "range": (owned.piece.start, owned.piece.stop),
                "size": owned.whole.shape,
                "stride": owned.whole.stride(),
                "scalars": self._scalars(options[key]),
                "state": dict(kept[owned.part]),
            }
            for key, owned in self._owned.items()
            if key in numbers and owned.part in kept
        }
        chunk = self._chunks[0]
        return {
            "rank": chunk.rank,
            "ranks": chunk.ranks,
            "ranges": self._ranges(numbers),
            "param_groups": groups,
            "state": state,
        }

    def _ranges(self, numbers: Mapping[int, int]) -> dict[int, tuple[int, int]]:
        """Which elements this rank owns, by the number of the parameter."""
        return {
            numbers[key]: (owned.piece.start, owned.piece.stop)
            for key, owned in self._owned.items()
            if key in numbers
        }

    def load_whole(self, loaded: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Keep this rank's part of what `whole()`, or a plain optimizer, has saved.

        Args:
            loaded: It. It is not kept.
            defaults: Of the optimizer: the options that there are.

        Raises:
            ConfigError: When it does not fit these parameters. Nothing was loaded then.
        """
        check_form(loaded)
        groups = self._checked_groups(loaded, defaults)
        names = self._names()
        states: dict[int, State] = {}
        for owned, options, kept in self._matched(groups, loaded["state"]):
            name = names[id(owned.whole)]
            states[id(owned.whole)] = cut(kept, owned, self._scalars(options), name)
        self._load(groups, states)

    def load_local(self, loaded: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Keep what `local()` has saved on this rank; the arguments are those of `load_whole`.

        Raises:
            ConfigError: When it is that of another rank, or of other parts. Nothing was loaded.
        """
        check_form(loaded)
        chunk = self._chunks[0]
        then = loaded.get("rank"), loaded.get("ranks")
        groups = self._checked_groups(loaded, defaults)
        # All that it owned then, also where it had no state yet: what another had is not here.
        ranges = {number: tuple(range_) for number, range_ in loaded.get("ranges", {}).items()}
        if then != (chunk.rank, chunk.ranks) or ranges != self._ranges(self._packed()[1]):
            raise ConfigError(
                f"the checkpoint is that of rank {then[0]} of {then[1]}, and this is rank "
                f"{chunk.rank} of {chunk.ranks}, or parameters were divided otherwise.",
                why="each rank saved its part alone.",
                instead="join those of all ranks with join_state_dicts(), and load that with "
                "load_state_dict().",
            )
        states = {
            id(owned.whole): {
                key: value.clone() if isinstance(value, Tensor) else value
                for key, value in kept["state"].items()
            }
            for owned, _, kept in self._matched(groups, loaded["state"])
        }
        self._load(groups, states)

    def _checked_groups(
        self, loaded: Mapping[str, Any], defaults: Mapping[str, Any]
    ) -> list[dict[str, Any]]:
        groups: list[dict[str, Any]] = deepcopy(loaded["param_groups"])
        sizes = [len(group["params"]) for group in groups]
        own = [len(group["params"]) for group in self._groups]
        if sizes != own:
            raise ConfigError(
                f"the checkpoint has groups of {sizes} parameters, and the optimizer of {own}.",
                instead="build the optimizer over the same parameters as when it was saved.",
            )
        check_options(groups, defaults)
        return groups

    def _matched(
        self, groups: list[dict[str, Any]], state: Mapping[Any, Any]
    ) -> Iterator[tuple[Owned, dict[str, Any], Any]]:
        """What this rank owns of each parameter with state, its options, and that state."""
        for group, loaded in zip(self._groups, groups, strict=True):
            for parameter, key in zip(group["params"], loaded["params"], strict=True):
                owned = self._owned.get(id(parameter))
                if owned is not None and state.get(key):
                    yield owned, {**options_of(group), **loaded}, state[key]

    def _load(self, groups: list[dict[str, Any]], states: Mapping[int, State]) -> None:
        """Give the inner optimizer state of the parts, and all groups their options."""
        inner_groups: list[dict[str, Any]] = []
        inner_state: dict[int, State] = {}
        count = 0
        for group, loaded in zip(self._groups, groups, strict=True):
            keys = [id(p) for p in group["params"] if id(p) in self._owned]
            numbers = list(range(count, count + len(keys)))
            count += len(keys)
            inner_state.update(
                {n: states[key] for n, key in zip(numbers, keys, strict=True) if key in states}
            )
            options = {**options_of(group), **options_of(loaded)}
            inner_groups.append({**options, "params": numbers})
        self._inner.load_state_dict({"state": inner_state, "param_groups": inner_groups})
        for group, loaded in zip(self._groups, groups, strict=True):
            group.update(options_of(loaded))

    def _packed(self) -> tuple[list[dict[str, Any]], dict[int, int]]:
        """Groups with numbers instead of parameters, as torch saves them; and the numbers."""
        numbers: dict[int, int] = {}
        packed = []
        for group in self._groups:
            for parameter in group["params"]:
                numbers.setdefault(id(parameter), len(numbers))
            packed.append({**group, "params": [numbers[id(p)] for p in group["params"]]})
        return packed, numbers

    def _names(self) -> dict[int, str]:
        return {
            id(parameter): name
            for chunk in self._chunks
            for name, parameter in chunk.reducer.parameters.named()
        }

    def _options(self) -> dict[int, dict[str, Any]]:
        """By the id of a parameter."""
        return {id(p): group for group in self._groups for p in group["params"]}

    def _scalars(self, options: Mapping[str, Any]) -> Collection[str]:
        return [entry.name for entry in self._rule(options) if entry.is_scalar]
