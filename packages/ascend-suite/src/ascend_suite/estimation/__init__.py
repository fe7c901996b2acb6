"""What a training takes, from the shape of its model and a plan. Imports no torch.

From small to large: `kernels` (how devices differ), `counts` (parameters), `tape` (what operators
save and make), `block` (those of a decoder), `treatment` (what a plan does to a layer), `layer`,
`optimizer`, `pipeline`, `memory` (a device over a step), `time`, and `estimate`.
"""
