"""Finding out what a module of somebody else's computes, and computing it by an operator.

[Note: proof by running]
A class called `LlamaRMSNorm` may multiply by `weight` or by `1 + weight`, an `MLP` gate by silu or
by gelu, and a subclass of either do something before or after. So a name makes a module a
candidate and nothing more: its forward is run, on a few numbers, and it is taken when they agree
with the operator's formula, as closely as the rounding of their dtype lets them, in each dtype,
training or not.

What runs is the forward of the module's class on a *double*: an object of the same class that
shares the module's attributes, but has parameters of its own (random ones: a norm's weight that is
still all ones would prove nothing), no hooks, and, in place of an MLP's linear layers, stand-ins
that note what they are given and return random numbers. So the module itself is not touched, no
hook fires, no weight is copied, and weights may be anywhere, on the meta device too.
"""
