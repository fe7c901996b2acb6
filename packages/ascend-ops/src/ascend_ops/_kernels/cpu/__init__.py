"""The operators by C, and torch's own fused operators, on a CPU."""
