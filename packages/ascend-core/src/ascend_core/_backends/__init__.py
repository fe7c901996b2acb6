"""The backends, one module each; `ascend_core.device` chooses among them."""
