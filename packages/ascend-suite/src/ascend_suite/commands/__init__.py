"""The commands of `ascend-suite`, one a module. Needs typer and rich; imports no torch."""
