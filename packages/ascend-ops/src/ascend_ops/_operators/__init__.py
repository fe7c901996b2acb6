"""The operators as torch knows them: `torch.ops.ascend_ops`, with fakes and gradients.

[Note: an operator is a schema, a choice and a gradient]
`swiglu` is defined once, for every device. Its body chooses a backend (`_backends.choose`) and
calls its kernel; nothing of that is seen by `torch.compile` and `torch.export`, which work with the
schema and the fake. The gradient is an operator too, `swiglu_backward`, and has a gradient of its
own in turn, which is autograd's of the reference formula: slow, and rarely asked for.

The name of a backend is an argument of the schema, so that forward and backward agree on it without
a state between them. Outputs are contiguous, whatever the inputs are, and alias no input.
"""
