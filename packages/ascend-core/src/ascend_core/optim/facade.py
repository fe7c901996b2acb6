"""A true `torch.optim.Optimizer` around another one, which it steps in windows."""

from __future__ import annotations

import contextlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import optim
from torch.utils.hooks import RemovableHandle

from ascend_core.errors import ConfigError, FeatureError, OptimizerFailedError
from ascend_core.optim.checkpoint import Loading, fill, for_wrapped, state_of
from ascend_core.optim.checks import check_form, check_groups, check_options
from ascend_core.optim.engine import Engine
from ascend_core.optim.gradients import Gradients, Scaling
from ascend_core.optim.home import CohortWindow, Home, Slot
from ascend_core.optim.identity import ParameterWatch
from ascend_core.optim.journal import Journal, failed_because, is_torchs
from ascend_core.optim.roster import Place, Roster
from ascend_core.optim.schedulers import tell_schedulers
from ascend_core.optim.view import Entries, StateView

__all__ = ["WindowedOptimizer"]


class WindowedOptimizer(optim.Optimizer):
    """Made by `windowed`. An instance is also one of the class that it wraps.

    `param_groups`, `defaults` and the hooks are those of the wrapped optimizer, shared with it.
    `state` is what the wrapped optimizer would show, wherever it lives; reading it blocks the host
    until the last step has been computed and no copy of it is under way.
    """

    # GradScaler hands its scale and its verdict over, and leaves the rest to `step`.
    _step_supports_amp_scaling = True

    _home: Home
    _roster: Roster
    _engine: Engine
    _gradients: Gradients
    _inner: optim.Optimizer
    _guards: list[RemovableHandle]
    _watch: ParameterWatch
    _journal: Journal | None
    _scaling_of_step: Scaling
    _is_saving: bool
    _left_behind: dict[torch.Tensor, Any]  # the wrapped optimizer's, of parameters of no group

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Step every parameter that has a gradient.

        A step that an exception interrupted is finished by the next call, with the same gradients.

        Args:
            closure: Computes the loss, and the gradients, anew.

        Returns:
            What the closure returned.

        Raises:
            OptimizerFailedError: When this step, or one before it, failed half-way.
            ConfigError: When a gradient or parameter is one that cannot be stepped in windows, or
                an interrupted step is to be finished with other gradients. Nothing was stepped.
            HostMemoryError: When state of new parameters finds no room. Nothing was stepped.
        """
        self._check_usable()
        tell_schedulers(self._inner)
        loss = None
        if closure is not None:
            self._check_not_interrupted("step(closure)")
            with torch.enable_grad():
                loss = closure()
        try:
            self._step()
        except BaseException as error:
            # The scaler deletes these after a step that ended, and multiplies those it finds.
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            if is_torchs(error) and self._runs_later():
                # The kernel that failed may be one of the last step.
                raise self._fail(error) from error
            raise
        return loss

    def _step(self) -> None:
        journal = self._journal
        if (
            journal is not None
            and journal.is_complete
            and not journal.has_same(self._gradients.token)
        ):
            journal.close()
            journal = None  # interrupted behind the last window, and these gradients are new
        if journal is None:
            self._follow()
            self._home.spread_scalars()
            active = {slot for slot in self._roster.slots if self._gradients.has(slot)}
            scaling = self._scaling(active)
            if scaling is None:
                for slot in active:
                    self._gradients.release(slot)
            if not active or scaling is None:
                return
            windows = [w for w in self._roster.windows() if _touches(w, active)]
            journal = Journal(windows, {slot: self._gradients.token(slot) for slot in active})
            self._scaling_of_step = scaling
        else:
            journal.check_same(self._gradients.token)
        self._journal = journal
        try:
            self._engine.run(journal, journal.slots, self._scaling_of_step)
        except BaseException:
            if journal.failure is None and not journal.is_begun:
                journal.close()
                self._journal = None
            raise
        self._journal = None

    def _scaling(self, active: set[Slot]) -> Scaling | None:
        """What the step multiplies gradients by; None when it is to be skipped.

        Fused kernels read the scaler's verdict on the device. Other forms count steps on the host,
        so for them the host has to read it, as `GradScaler` itself does.
        """
        scale = getattr(self, "grad_scale", None)
        found_inf = getattr(self, "found_inf", None)
        if found_inf is not None and active and not isinstance(found_inf, torch.Tensor):
            raise ConfigError(
                "the gradient scaler found no gradient to look at.",
                why="there was none when its unscale_ was called, so it would miss an inf.",
                instead="call unscale_ after backward.",
            )
        on_device = all(slot.group.get("fused") and not slot.unmade for slot in active)
        if isinstance(found_inf, torch.Tensor) and not on_device:
            if found_inf.item():
                return None
            found_inf = None
        return Scaling(scale, found_inf)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the norm of all gradients together, wherever they are.

        The same as `torch.nn.utils.clip_grad_norm_` over the parameters, bit for bit, and as often
        as it is called: the gradients themselves are clipped. One that is on the host is multiplied
        when it is next read, so that it need not move for that alone; what replaces it, or is
        made after `zero_grad`, is not clipped.

        Where a `GradScaler` is in use, call its `unscale_` before, except with FP16 parameters,
        whose gradients it refuses to unscale: give `max_norm` times the scale then.

        Args:
            max_norm: The most that the norm may be.
            norm_type: Which norm, as in `torch.nn.utils.clip_grad_norm_`.

        Returns:
            The total norm before clipping; 0-d, on the gradients' device.

        Raises:
            OptimizerFailedError: When a step failed or was interrupted half-way.
        """
        self._check_usable()
        self._check_not_interrupted("clip_grad_norm_")
        self._follow()
        found = [s for s in self._roster.slots if self._gradients.has(s)]
        if not found:
            return torch.tensor(0.0, device="cpu")
        return self._gradients.clip(found, max_norm, norm_type)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients; see `torch.optim.Optimizer.zero_grad`."""
        self._home.tidy()
        super().zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which gets the defaults that are missing, and room for its state.

        Raises:
            HostMemoryError: When there is no room. The group was not added then.
        """
        self._check_usable()
        super().add_param_group(param_group)
        try:
            self._follow()
        except BaseException:
            self.param_groups.pop()
            raise

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """What is kept for each parameter that was stepped: live tensors, wherever they live.

        The tensors may be written to; the mapping itself is made anew and takes nothing. What a
        parameter has is read, and its master joined, when it is asked for.
        """
        self._check_readable()
        slots = {s.parameter: s for s in self._roster.slots if s.is_stepped and s.entries}
        return StateView(slots, lambda parameter: self._visible_state(slots[parameter]))

    def _visible_state(self, slot: Slot) -> dict[str, torch.Tensor]:
        self._check_readable()  # again: the view may be older than the last step
        found = state_of(slot, self._home)
        return found if self._is_saving else Entries(found)

    def state_dict(self) -> dict[str, Any]:
        """See `torch.optim.Optimizer.state_dict`. Its dictionaries are the caller's to change."""
        self._is_saving = True
        try:
            return super().state_dict()
        finally:
            self._is_saving = False

    def _check_readable(self) -> None:
        self._check_usable()
        self._check_not_interrupted("reading the state")
        try:
            self._home.settle()
        except RuntimeError as error:
            raise self._fail(error) from error

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of the plain one that it wraps.

        Values are copied to where state lives, one tensor at a time, at the dtype that it is kept
        at. Where the checkpoint has no FP32 master, the weight as it is becomes the master. Ends
        the state of having failed.

        Args:
            state_dict: What `state_dict()` returned. It is not kept.

        Raises:
            ConfigError: When it does not fit these parameters. Nothing was loaded then.
            OptimizerFailedError: When the device on which a kernel failed raises still.
        """
        self._check_not_removed()
        check_form(state_dict)
        loaded = dict(state_dict)
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            loaded = hook(self, loaded) or loaded
        check_form(loaded)
        groups = deepcopy(loaded["param_groups"])
        check_options(groups, self.defaults)
        if isinstance(self, optim.AdamW):
            for group in groups:  # as its __setstate__ has it: a checkpoint may be Adam's
                group["decoupled_weight_decay"] = True
        self._load(Loading(groups, loaded["state"], self.param_groups))
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    @torch.no_grad()
    def _load(self, loading: Loading) -> None:
        self._follow(also=loading.places)
        if self._journal is not None and self._journal.failure is not None:
            # What is still to be told of the failure is of no interest: all is set anew.
            with contextlib.suppress(RuntimeError):
                self._home.settle()
        try:
            loading.write(self.param_groups, self._roster, self._home)
        except RuntimeError as error:
            if is_torchs(error) and self._runs_later():
                raise self._fail(error) from error
            raise
        if any(not slot.has_master for slot in loading.with_masters(self._roster)):
            warnings.warn(
                "the checkpoint has FP32 masters that this optimizer does not keep, and they were "
                "dropped: what they hold beyond the weights is lost (master_weights=True keeps it)",
                UserWarning,
                stacklevel=3,
            )
        if self._journal is not None:
            self._journal.abandon()
        self._journal = None

    def report(self) -> Mapping[str, Any]:
        """What is kept where, in bytes, and how it is cut."""
        windows = list(self._roster.windows())
        return {
            "optimizer": type(self._inner).__name__,
            "parameters": len(self._roster.slots),
            "windows": len(windows),
            **self._home.report(),
        }

    def remove(self) -> None:
        """Give the state back to the wrapped optimizer, on the device, and let go of it.

        Where the device has no room for it, all of it is given back in host memory, with a warning.
        FP32 masters have no place there; what they hold beyond the weight is lost. A second call
        does nothing.

        Raises:
            OptimizerFailedError: When a step failed half-way and no checkpoint was loaded since.
        """
        if self._roster.is_closed:
            return
        self._inner.state.update(self._given_back())
        self._gradients.close()
        self._watch.close()
        self._roster.close()
        for guard in self._guards:
            guard.remove()

    def _given_back(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The state as the wrapped optimizer keeps it."""
        state = self.state
        slots = [slot for slot in self._roster.slots if slot.parameter in state]

        def given(device: torch.device | None) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
            return {
                slot.parameter: for_wrapped(slot, state[slot.parameter], device=device)
                for slot in slots
            }

        with contextlib.suppress(torch.OutOfMemoryError):
            return given(None)
        warnings.warn(
            f"the state of {type(self._inner).__name__} has no room on {slots[0].parameter.device} "
            "and was given back in host memory: state_dict() has it, and before the next step "
            "optimizer.load_state_dict(optimizer.state_dict()) moves it, once there is room",
            UserWarning,
            stacklevel=3,
        )
        return given(torch.device("cpu"))

    def __deepcopy__(self, memo: dict[int, Any]) -> WindowedOptimizer:
        raise _refused_copy("copied", "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refused_copy("pickled", "pickle")

    def _follow(self, also: Collection[Place] = ()) -> None:
        """Bring the slots up to date with `param_groups`, and those with the modules."""
        check_groups(self.param_groups)
        self._watch.update(self.param_groups)
        self._roster.follow(self.param_groups, also)
        self._gradients.follow(self._roster.slots)
        for slot in self._roster.slots if self._left_behind else ():
            if left := self._left_behind.pop(slot.parameter, None):
                fill(slot, self._home, left)
        self._watch.follow(p for group in self.param_groups for p in group["params"])

    def _check_not_removed(self) -> None:
        if self._roster.is_closed:
            raise FeatureError(
                "this optimizer was removed.",
                instead="use the optimizer that it was made from.",
            )

    def _check_usable(self) -> None:
        self._check_not_removed()
        if self._journal is not None and self._journal.failure is not None:
            raise self._journal.failure

    def _check_not_interrupted(self, what: str) -> None:
        if self._journal is not None and self._journal.is_open:
            raise OptimizerFailedError(
                f"{what} is not possible in the middle of a step.",
                why="the last step was interrupted: some windows were stepped and others not.",
                instead="call step() again with the same gradients, or load a checkpoint.",
            )

    def _runs_later(self) -> bool:
        return any(slot.parameter.device.type != "cpu" for slot in self._roster.slots)

    def _fail(self, error: BaseException) -> OptimizerFailedError:
        if self._journal is not None:
            self._journal.close()
        self._journal = Journal([], {})
        self._journal.failure = failed_because(error)
        return self._journal.failure


def _refused_copy(what: str, by: str) -> FeatureError:
    return FeatureError(
        f"a windowed optimizer cannot be {what}.",
        why=f"{by} would copy the tables that tie host memory and streams to these parameters.",
        instead="build a second optimizer and give it this one's state_dict().",
    )


def _touches(window: CohortWindow, active: set[Slot]) -> bool:
    return any(window.slot(piece) in active for piece in window.slices)
