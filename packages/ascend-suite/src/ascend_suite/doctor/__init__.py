"""What this machine has, and what of it will make training fail or slow. Imports no torch.

facts = read_machine()          # asks torch and others in a process of their own
findings = diagnose(facts)      # a pure function
"""

from __future__ import annotations

from ascend_suite.doctor.diagnosis import diagnose
from ascend_suite.doctor.machine import Machine
from ascend_suite.doctor.reading import read_machine

__all__ = ["Machine", "diagnose", "read_machine"]
