"""The demo: a byte-level GPT trained once plain and once per feature that is installed.

This package imports no torch; `demo.runner`, `demo.training`, `demo.gpt` and `demo.corpus` do.
"""
