"""The structures in Python are those of the header."""

from __future__ import annotations

import ctypes
import dataclasses
import re

import pytest

from ascend_sim import Counters, Fault, _runtime
from ascend_sim._build import NATIVE
from ascend_sim.config import SCHEDULES
from ascend_sim.spans import Kind

HEADER = (NATIVE / "runtime/control.h").read_text()
TYPES = {
    "uint64_t": ctypes.c_uint64,
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "double": ctypes.c_double,
    "const char*": ctypes.c_char_p,
}


def fields_of(structure: str) -> list[tuple[str, object]]:
    match = re.search(rf"struct {structure} {{(.*?)}};", HEADER, re.DOTALL)
    assert match is not None
    body = re.sub(r"//.*", "", match.group(1))
    declared = re.findall(r"(const char\*|\w+) ([\w, ]+);", body)
    return [(name, TYPES[kind]) for kind, names in declared for name in names.split(", ")]


@pytest.mark.parametrize(
    ("structure", "mirror"),
    [
        ("AscendsimSettings", _runtime._Settings),
        ("AscendsimCounters", _runtime._Counters),
        ("AscendsimSpan", _runtime._Span),
        ("AscendsimRace", _runtime._Race),
    ],
)
def test_fields_agree(structure: str, mirror: type[ctypes.Structure]) -> None:
    assert list(mirror._fields_) == fields_of(structure)


def test_counters_have_the_names_of_the_header() -> None:
    names = [name for name, _ in fields_of("AscendsimCounters")]
    assert [field.name for field in dataclasses.fields(Counters)] == names


def test_numbers_of_schedules_faults_and_kinds_agree() -> None:
    numbers = dict(re.findall(r"ASCENDSIM_(\w+) = (\d+)", HEADER))
    assert {name: int(numbers[name.upper()]) for name in SCHEDULES} == {
        name: i for i, name in enumerate(SCHEDULES)
    }
    assert {fault.name: fault.value for fault in Fault} == {
        fault.name: int(numbers[f"FAULT_{fault.name}"]) for fault in Fault
    }
    assert {kind.name: kind.value for kind in Kind} == {
        kind.name: int(numbers[f"KIND_{kind.name}"]) for kind in Kind
    }


def test_the_interface_has_the_version_that_python_speaks() -> None:
    assert f"#define ASCENDSIM_ABI {_runtime.ABI}u" in HEADER
