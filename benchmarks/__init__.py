"""The benchmarks: `python -m benchmarks NAME --json FILE`.

Each `bench_<name>.py` has a function `cases(*, quick: bool) -> list[Case]`; see `case.py` for what
a case is and `timing.py` for how its variants are compared.
"""
