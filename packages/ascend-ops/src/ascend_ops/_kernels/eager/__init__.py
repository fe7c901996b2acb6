"""The operators by torch's own operators, on every device: they save their inputs alone."""
