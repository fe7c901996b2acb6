"""Run against the installed wheel, beside nothing but its declared dependencies."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import ascend_suite
from ascend_core import discover

assert metadata.version("ascend-suite") == ascend_suite.__version__
assert "recompute-activation" in discover(), "the suite brings the features"

[command] = metadata.entry_points(group="console_scripts", name="ascend-suite")
program = f"import sys; from {command.module} import {command.attr}; sys.exit({command.attr}())"
for arguments, read in ((["--help"], ""), (["check", "-"], "[recompute-norm]")):
    command_line = [sys.executable, "-c", program, *arguments]
    subprocess.run(command_line, input=read.encode(), check=True, stdout=subprocess.DEVNULL)
