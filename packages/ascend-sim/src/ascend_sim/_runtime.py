"""The C interface of the simulated runtime (native/runtime/control.h), through ctypes."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

from ascend_sim.config import SCHEDULES, SimConfig
from ascend_sim.counters import Counters
from ascend_sim.races import Race, Touch
from ascend_sim.spans import Kind, Span

ABI = 4

# The names by which torch_npu finds the runtime. The first has all functions, the others need it.
LIBRARIES = (
    "libascendcl.so",
    "libhccl.so",
    "libacl_op_compiler.so",
    "libge_runner.so",
    "libgraph.so",
    "libacl_tdt_channel.so",
    "libhcomm.so",
)
ALLOCATORS = "libascendsim_allocators.so"
KERNELS = "libascendsim_kernels.so"

_TEXT_BYTES = 4096


class _Settings(ctypes.Structure):
    _fields_ = (
        ("hbm_bytes", ctypes.c_uint64),
        ("query_stall", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("h2d_gbps", ctypes.c_double),
        ("d2h_gbps", ctypes.c_double),
        ("d2d_gbps", ctypes.c_double),
        ("copy_latency_us", ctypes.c_double),
        ("collective_timeout_s", ctypes.c_double),
        ("launch_us", ctypes.c_double),
        ("kernel_us", ctypes.c_double),
        ("memory_gbps", ctypes.c_double),
        ("matmul_tflops_16", ctypes.c_double),
        ("matmul_tflops_32", ctypes.c_double),
        ("link_latency_us", ctypes.c_double),
        ("link_gbps", ctypes.c_double),
        ("devices", ctypes.c_uint32),
        ("schedule", ctypes.c_int32),
        ("poison", ctypes.c_int32),
        ("blocking_sends", ctypes.c_int32),
        ("trace", ctypes.c_int32),
    )


class _Counters(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "h2d_bytes",
            "d2h_bytes",
            "d2d_bytes",
            "h2d_copies",
            "d2h_copies",
            "d2d_copies",
            "synchronisations",
            "event_queries",
            "kernels",
            "device_allocations",
            "pinned_allocations",
            "device_segments",
            "pinned_segments",
            "tasks_submitted",
            "tasks_pending",
            "device_bytes",
            "pinned_bytes",
            "faults_injected",
        )
    )


class _Span(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("ticket", ctypes.c_uint64),
        ("after_ticket", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("flops", ctypes.c_uint64),
        ("submitted_ns", ctypes.c_uint64),
        ("begin_ns", ctypes.c_uint64),
        ("end_ns", ctypes.c_uint64),
        ("kind", ctypes.c_int32),
        ("device", ctypes.c_int32),
        ("stream", ctypes.c_int32),
        ("after_stream", ctypes.c_int32),
    )


class _Race(ctypes.Structure):
    _fields_ = (
        ("first", ctypes.c_char_p),
        ("second", ctypes.c_char_p),
        ("first_ticket", ctypes.c_uint64),
        ("second_ticket", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("first_stream", ctypes.c_int32),
        ("second_stream", ctypes.c_int32),
        ("first_writes", ctypes.c_int32),
        ("second_writes", ctypes.c_int32),
    )


class Runtime:
    """The loaded libraries.

    Args:
        folder: Where the compiled libraries are. They are loaded by path, once; torch_npu's own
            attempts to load them by name then find them.
    """

    def __init__(self, folder: Path) -> None:
        self._libraries = [ctypes.CDLL(str(folder / name)) for name in LIBRARIES]
        self._folder = folder
        self._acl = self._libraries[0]
        self._acl.ascendsim_abi.restype = ctypes.c_uint32
        self._acl.ascendsim_device_bytes.restype = ctypes.c_uint64
        self._acl.ascendsim_inject.restype = ctypes.c_uint64
        self._acl.ascendsim_inject.argtypes = (ctypes.c_int32, ctypes.c_uint64)
        self._acl.ascendsim_take_error.argtypes = (ctypes.c_char_p, ctypes.c_uint64)
        for function in (self._acl.ascendsim_spans, self._acl.ascendsim_take_races):
            function.restype = ctypes.c_uint64
            function.argtypes = (ctypes.c_void_p, ctypes.c_uint64)
        self._acl.ascendsim_clock.restype = ctypes.c_uint64
        assert self._acl.ascendsim_abi() == ABI

    def configure(self, config: SimConfig) -> None:
        """Fix the settings; nothing may have used the runtime before."""
        settings = _Settings(
            hbm_bytes=config.hbm_bytes,
            query_stall=config.query_stall,
            seed=config.seed,
            h2d_gbps=config.h2d_gbps or 0.0,
            d2h_gbps=config.d2h_gbps or 0.0,
            d2d_gbps=config.d2d_gbps or 0.0,
            copy_latency_us=config.copy_latency_us or 0.0,
            collective_timeout_s=config.collective_timeout_s,
            devices=config.devices,
            schedule=SCHEDULES.index(config.schedule),
            poison=int(config.poison),
            blocking_sends=int(config.blocking_sends),
            trace=int(config.trace),
        )
        if config.schedule == "timed":
            for name, figure in dataclasses.asdict(config.rates()).items():
                setattr(settings, name, figure)
        status = self._acl.ascendsim_configure(ctypes.byref(settings))
        assert status == 0, "the runtime was used before it was configured"

    def install(self, library: str, option: bool) -> ctypes.CDLL:
        """Load a library that extends torch_npu, and let it install itself.

        Returns:
            The library.

        Raises:
            RuntimeError: When that fails.
        """
        loaded = ctypes.CDLL(str(self._folder / library))
        self._libraries.append(loaded)
        stem = library.removeprefix("lib").removesuffix(".so")
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        result: int = loaded[f"{stem}_install"](int(option), text, ctypes.c_uint64(_TEXT_BYTES))
        if result < 0:
            raise RuntimeError(f"{library}: {text.value.decode(errors='replace')}")
        return loaded

    def counters(self) -> Counters:
        """Read the counters."""
        read = _Counters()
        self._acl.ascendsim_counters(ctypes.byref(read))
        names = [field.name for field in dataclasses.fields(Counters)]
        return Counters(**{name: getattr(read, name) for name in names})

    def device_bytes(self, device: int) -> int:
        """Bytes of a device's memory that the allocators hold."""
        return int(self._acl.ascendsim_device_bytes(device))

    def inject(self, fault: int, nth: int) -> int:
        """Arm a fault, or disarm it with 0; return how far away it still was."""
        return int(self._acl.ascendsim_inject(fault, nth))

    def drain(self) -> None:
        """Run every task that was submitted."""
        self._acl.ascendsim_drain()

    def reseed(self) -> None:
        """Let the schedule "random" choose as at its beginning."""
        self._acl.ascendsim_reseed()

    def clock_ns(self) -> int:
        """Read the host's modelled clock."""
        return int(self._acl.ascendsim_clock())

    def keep_spans(self, keep: bool) -> None:
        """Begin to keep the spans of the modelled clock, with none, or end to."""
        self._acl.ascendsim_keep_spans(int(keep))

    def spans(self) -> list[Span]:
        """Copy the spans that were kept."""
        room = self._acl.ascendsim_spans(None, 0)
        read = (_Span * room)()
        self._acl.ascendsim_spans(read, room)
        return [
            Span(
                name=span.name.decode(),
                kind=Kind(span.kind),
                device=span.device,
                stream=span.stream,
                ticket=span.ticket,
                after=(span.after_stream, span.after_ticket) if span.after_ticket else None,
                bytes=span.bytes,
                flops=span.flops,
                submitted_ns=span.submitted_ns,
                begin_ns=span.begin_ns,
                end_ns=span.end_ns,
            )
            for span in read
        ]

    def take_races(self) -> list[Race]:
        """Take the races that were found since the last call."""
        room = 1024
        read = (_Race * room)()
        found = min(room, self._acl.ascendsim_take_races(read, room))
        return [
            Race(
                first=Touch(
                    race.first.decode(),
                    race.first_stream,
                    race.first_ticket,
                    bool(race.first_writes),
                ),
                second=Touch(
                    race.second.decode(),
                    race.second_stream,
                    race.second_ticket,
                    bool(race.second_writes),
                ),
                address=race.address,
                bytes=race.bytes,
            )
            for race in read[:found]
        ]

    def take_error(self) -> str | None:
        """Forget all errors of tasks; return the oldest that nobody was told of, if any."""
        text = ctypes.create_string_buffer(_TEXT_BYTES)
        if not self._acl.ascendsim_take_error(text, _TEXT_BYTES):
            return None
        return text.value.decode(errors="replace")
