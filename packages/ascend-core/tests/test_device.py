"""Backends: found by name, by machine and from what is at hand; one protocol for all."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from ascend_core.device import (
    Backend,
    available_backends,
    backend_of,
    current_backend,
    device_of,
    get_backend,
)
from ascend_core.errors import ConfigError, DeviceUnavailableError
from ascend_core.streams import InlineEvent, InlineStream
from ascend_core.testing import parametrize_devices

MISSING = [name for name in ("npu", "cuda") if name not in available_backends()]


def test_the_cpu_is_always_available() -> None:
    assert available_backends()[-1] == "cpu"
    assert get_backend("cpu").is_available()
    assert get_backend("cpu").unavailable_because() is None


def test_the_current_backend_is_the_best_available() -> None:
    assert current_backend().name == available_backends()[0]


def test_an_accelerator_is_preferred_to_the_cpu_and_npu_to_cuda() -> None:
    assert list(available_backends()) == sorted(
        available_backends(), key=["npu", "cuda", "cpu"].index
    )


@pytest.mark.parametrize("name", MISSING)
def test_a_missing_backend_says_why_and_lists_what_there_is(name: str) -> None:
    with pytest.raises(DeviceUnavailableError, match=f"no {name} device here") as caught:
        get_backend(name)
    assert caught.value.why
    assert ", ".join(available_backends()) in str(caught.value.instead)
    assert get_backend("cpu").device_count() == 1


def run_without_autoload(code: str, *folders: Path) -> list[str]:
    """Run Python in a process where `import torch` does not import torch_npu by itself."""
    path = ":".join([*map(str, folders), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )
    return done.stdout.splitlines()


def test_a_missing_torch_npu_is_the_reason_given() -> None:
    code = """
import importlib.util
from ascend_core._backends.npu import NpuBackend
importlib.util.find_spec = lambda name: None
print(NpuBackend().unavailable_because())
"""
    assert run_without_autoload(code) == ["torch_npu is not installed."]


def test_a_broken_torch_npu_is_imported_once_and_quoted(tmp_path: Path) -> None:
    (tmp_path / "torch_npu.py").write_text(
        "print('importing'); raise OSError('libascendcl.so: cannot open shared object file')"
    )
    code = """
from ascend_core import current_backend, get_backend
try:
    get_backend("npu")
except RuntimeError as error:
    print(error.why)
print(current_backend().name)
"""
    importing, why, best = run_without_autoload(code, tmp_path)
    assert importing == "importing"
    assert why.endswith("OSError: libascendcl.so: cannot open shared object file")
    assert best != "npu"


@pytest.mark.parametrize(
    ("name", "meant"),
    [("gpu", "cuda"), ("CUDA", "cuda"), ("NPU", "npu"), ("ascend", "npu"), ("cpuu", "cpu")],
)
def test_an_unknown_name_lists_the_valid_ones_and_suggests_one(name: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="npu, cuda, cpu") as caught:
        get_backend(name)
    assert caught.value.instead == f"did you mean {meant!r}?"


@pytest.mark.parametrize("name", ["xyz", ""])
def test_a_name_like_none_of_them_gets_no_suggestion(name: str) -> None:
    with pytest.raises(ConfigError, match="npu, cuda, cpu") as caught:
        get_backend(name)
    assert caught.value.instead == "use one of them."


def test_importing_and_finding_the_cpu_initialises_no_device() -> None:
    code = """
import torch, ascend_core
ascend_core.get_backend("cpu"), ascend_core.Transfer("cpu"), ascend_core.PinnedPool()
import ascend_core.device, ascend_core.transfer, ascend_core.modes
assert not torch.cuda.is_initialized()
import sys
assert "torch_npu" not in sys.modules
"""
    assert run_without_autoload(code) == []


@parametrize_devices()
def test_a_tensor_a_module_and_a_device_lead_to_one_backend(device: torch.device) -> None:
    module = nn.Linear(2, 2, device=device)
    for target in (torch.ones(2, device=device), module, device, str(device)):
        assert device_of(target) == device
        assert backend_of(target).name == device.type  # SA-20


def test_a_module_without_parameters_is_where_its_buffers_are() -> None:
    module = nn.BatchNorm1d(3, affine=False)
    assert device_of(module) == torch.device("cpu")


def test_a_module_without_tensors_goes_where_new_work_goes() -> None:
    assert device_of(nn.ReLU()) == current_backend().device()


def test_a_module_on_two_devices_has_no_single_one() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError, match="Sequential has no single device") as caught:
        device_of(module)
    assert "cpu, meta" in str(caught.value.why)


def test_a_tensor_without_a_backend_is_named() -> None:
    with pytest.raises(ConfigError, match=r"(?s)no backend called 'meta'.*to_empty"):
        backend_of(torch.ones(2, device="meta"))


@pytest.mark.parametrize("text", ["cpu:", "cpu:x", "cpu:0:0"])
def test_a_malformed_device_string_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is no device"):
        device_of(text)


def test_the_cpu_has_no_index() -> None:
    assert device_of("cpu:0") == torch.device("cpu")
    assert device_of(torch.device("cpu", 0)) == torch.device("cpu")


@parametrize_devices()
def test_a_device_index_out_of_range_says_how_many_there_are(device: torch.device) -> None:
    backend = backend_of(device)
    if device.type == "cpu":
        assert backend.device(7) == torch.device("cpu")
        return
    with pytest.raises(DeviceUnavailableError, match=f"no device {device.type}:99") as caught:
        backend.device(99)
    assert str(backend.device_count()) in str(caught.value.why)


@parametrize_devices()
def test_a_backend_has_what_the_protocol_says(device: torch.device) -> None:
    backend: Backend = backend_of(device)
    assert backend == get_backend(device.type)
    assert backend.device_count() >= 1
    assert backend.can_pin == (device.type != "cpu")
    assert set(backend.capabilities()) == {
        "model",
        "overlap",
        "bf16_matmul",
        "fused_attention",
        "fused_rms_norm",
        "fused_rotary",
        "fused_swiglu",
    }
    backend.reset_peak(device)
    assert ("active_bytes.all.peak" in backend.memory_stats(device)) == (device.type != "cpu")


@parametrize_devices()
def test_a_stream_context_makes_its_stream_current_and_puts_back(device: torch.device) -> None:
    backend = backend_of(device)
    before = backend.current_stream(device)
    stream = backend.new_stream(device)
    with pytest.raises(KeyError), backend.stream_context(stream):
        assert backend.current_stream(device) == stream
        raise KeyError
    assert backend.current_stream(device) == before


@parametrize_devices()
def test_two_threads_may_enter_one_stream(device: torch.device) -> None:
    backend = backend_of(device)
    shared = backend.new_stream(device)
    both_inside = threading.Barrier(2)
    wrong: list[str] = []

    def enter() -> None:
        own = backend.new_stream(device)
        with backend.stream_context(own):
            with backend.stream_context(shared):
                both_inside.wait(timeout=300)
            if backend.current_stream(device) != own:
                wrong.append("the stream of the other thread was put back")

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@parametrize_devices()
def test_events_order_streams_and_tell_the_time(device: torch.device) -> None:
    backend = backend_of(device)
    stream, event = backend.new_stream(device), backend.new_event()
    x = torch.zeros(1000, device=device)
    stream.wait_stream(backend.current_stream(device))
    with backend.stream_context(stream):
        x += 1
    event.record(stream)
    backend.record_stream(x, stream)
    backend.current_stream(device).wait_event(event)
    assert torch.equal(x.cpu(), torch.ones(1000))
    event.synchronize()
    assert event.query()
    first, last = backend.new_event(timing=True), backend.new_event(timing=True)
    first.record()
    x.mul_(2)
    last.record()
    last.synchronize()
    assert first.elapsed_time(last) >= 0
    backend.synchronize(device)
    assert stream.query()
    assert stream.record_event() is not None


@parametrize_devices()
def test_random_state_round_trips(device: torch.device) -> None:
    backend = backend_of(device)
    state = backend.get_rng_state(device)
    first = torch.rand(5, device=device)
    backend.set_rng_state(state, device)
    assert torch.equal(torch.rand(5, device=device), first)


def test_inline_streams_are_one_queue() -> None:
    stream, event = InlineStream(), InlineEvent()
    assert stream == InlineStream()
    assert stream.record_event(event) is event
    event.wait(stream)
    stream.wait_event(event)
    stream.wait_stream(InlineStream())
    stream.synchronize()


@pytest.mark.parametrize("timing", [(True, False), (False, True)])
def test_an_inline_event_without_timing_has_no_time(timing: tuple[bool, bool]) -> None:
    first, last = (InlineEvent(timing=t) for t in timing)
    first.record()
    last.record()
    with pytest.raises(ConfigError, match="time between two events"):
        first.elapsed_time(last)


def test_an_inline_event_that_was_not_recorded_has_no_time() -> None:
    with pytest.raises(ConfigError, match="time between two events"):
        InlineEvent(timing=True).elapsed_time(InlineEvent(timing=True))
