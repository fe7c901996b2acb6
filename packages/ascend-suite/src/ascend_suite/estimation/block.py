"""The tapes of a decoder block, of the embedding, and of the head with the loss. No torch.

The block is `x + projection(attention(qkv(norm(x))))`, then `x + mlp(norm(x))`, as in the demo's
model, Llama and GPT-3. `s b h` below are tokens, sequences and width, as in Korthikanti et al.
2022.
"""

from __future__ import annotations

import dataclasses

from ascend_suite.estimation.counts import layer_parameters, norm_parameters
from ascend_suite.estimation.kernels import Kernels
from ascend_suite.estimation.tape import Node, Tape, Value
from ascend_suite.shape import ModelShape

__all__ = ["TapeMaker"]

ACTIVATION, NORM = "recompute-activation", "recompute-norm"


class TapeMaker:
    """Writes the tapes of one shape on one kind of device.

    Args:
        shape: The model and its training.
        kernels: What the device's operators save.
        fused: The operators of fused-ops that are on: "swiglu", "rms_norm".
    """

    def __init__(self, shape: ModelShape, kernels: Kernels, fused: frozenset[str]) -> None:
        self.shape = shape
        self.kernels = kernels
        self.fused = fused
        self.item = shape.item_bytes
        self.tokens = shape.micro_batch * shape.seq // shape.cp
        # What tensor parallelism leaves whole is cut along the sequence, or it is not.
        self.rows = self.tokens // (shape.tp if shape.sequence_parallel else 1)
        self.hidden = self._bytes(self.rows * shape.hidden)

    def block(self) -> Tape:
        """The tape of one decoder block."""
        tape = Tape({"x0": Value(self.hidden, "norm", "input_norm")})
        parameters = {
            name: sum(self._bytes(size) for size in sizes)
            for name, sizes in layer_parameters(self.shape).items()
        }
        self._norm(tape, "x0", "n1", "input_norm", parameters["norm 1"])
        self._attention(tape, "n1", "a", parameters)
        self._residual(tape, "x0", "a", "x1", "self_attention")
        self._norm(tape, "x1", "n2", "post_attention_norm", parameters["norm 2"])
        mlp = self._gated if self.shape.activation == "swiglu" else self._classic
        mlp(tape, "n2", "m", parameters)
        self._residual(tape, "x1", "m", "x2", "mlp")
        return tape

    def head(self) -> Tape:
        """The tape of the last norm, the head and the loss."""
        shape = self.shape
        logits = self._bytes(self.tokens * shape.vocab // shape.tp)
        table = self._bytes(shape.vocab * shape.hidden // shape.tp)
        tape = Tape({"x": Value(self.hidden, "norm", "head")})
        norm = sum(self._bytes(size) for size in norm_parameters(shape))
        self._norm(tape, "x", "n", "head", norm)
        tape.values["logits"] = Value(logits, "loss", "head")
        self._linear(tape, "head", "n", "logits", table)
        last = "logits"
        if shape.fp32_loss and shape.dtype != "float32":
            tape.values["cast"] = Value(
                self._bytes(self.tokens * shape.vocab // shape.tp, 4), "loss"
            )
            tape.nodes.append(Node("head", ("logits",), "cast"))
            last = "cast"
        size = tape.values[last].bytes
        tape.values["log_softmax"] = Value(size, "loss", "head")
        tape.values["loss"] = Value(self.kernels.block(4), "loss", "head")
        tape.nodes.append(Node("head", (last,), "log_softmax", ("log_softmax",)))
        tape.nodes.append(Node("head", ("log_softmax",), "loss", ("log_softmax",)))
        return tape

    def embedding(self) -> Tape:
        """The tape of the embedding."""
        shape = self.shape
        table = self._bytes(shape.vocab * shape.hidden // shape.tp)
        positions = self._bytes(shape.seq * shape.hidden) if shape.positions == "learned" else 0
        tape = Tape({"e": Value(self.hidden, "embedding")})
        tape.nodes.append(Node("embedding", (), "e", parameters=table + positions))
        if shape.dropout:
            self._dropout(tape, "e", "x", "embedding")
        return tape

    # The parts of a block.

    def _norm(self, tape: Tape, x: str, n: str, module: str, parameters: int) -> None:
        """A norm of x; what it makes is saved by whoever reads it."""
        fp32 = self._bytes(self.rows * self.shape.hidden, 4)
        one = self.shape.norm == "layer" or self.kernels.rms_in_one or "rms_norm" in self.fused
        statistics, values = f"{x}.statistics", tape.values
        reader = "self_attention" if n == "n1" else module
        if one:
            numbers = 2 if self.shape.norm == "layer" else 1
            if "rms_norm" in self.fused and self.shape.norm == "rms":
                numbers = 0
            values[statistics] = Value(numbers * self._bytes(self.rows, 4), "norm", module)
            values[n] = Value(self.hidden, "norm", reader, NORM)
            tape.nodes.append(Node(module, (x,), n, (x, statistics), parameters=parameters))
            return
        # x / rms(x) * weight, in FP32: several operators, of which the one that multiplies by the
        # weight saves the normalised value.
        values[statistics] = Value(self._bytes(self.rows, 4), "norm", module)
        source = x
        if self.item != 4:
            source = f"{x}.fp32"
            values[source] = Value(fp32, "norm", module)
            tape.nodes.append(Node(module, (x,), source))
        normal, scaled = f"{x}.normal", f"{x}.scaled"
        values[normal] = Value(fp32, "norm", module, NORM)
        values[scaled] = Value(fp32, "norm", module)
        values[n] = Value(self.hidden, "norm", reader, NORM, (normal,))
        tape.nodes.append(Node(module, (source,), normal, (source, statistics), working=3 * fp32))
        out = n if self.item == 4 else scaled
        tape.nodes.append(
            Node(module, (normal,), out, (normal,), parameters=parameters, working=fp32)
        )
        if self.item != 4:
            tape.nodes.append(Node(module, (scaled,), n))

    def _attention(self, tape: Tape, n: str, a: str, parameters: dict[str, int]) -> None:
        shape, kernels, values = self.shape, self.kernels, tape.values
        module = "self_attention"
        heads = self.tokens * shape.heads // shape.tp
        queries = self.tokens * shape.query_size // shape.tp
        keys = self.tokens * shape.key_size // shape.tp
        values["qkv"] = Value(self._bytes(queries + 2 * keys), "qkv", module)
        values["mixed"] = Value(self._bytes(queries), "attention", module)
        values[a] = Value(self.hidden, "projection", module)
        self._linear(tape, module, n, "qkv", parameters["qkv"])
        if not shape.flash:
            self._scores(tape, heads)
            saves: tuple[str, ...] = ("qkv", "scores")
        else:
            numbers = 2 if kernels.attention_copies else 1
            each = self._bytes(heads * kernels.query_bytes // numbers, 1)
            values["queries"] = Value(each, "attention", module)
            values["queries'"] = Value(each * (numbers - 1), "attention", module)
            values["mask"] = Value(kernels.block(kernels.mask_bytes), "attention", module)
            saves = ("qkv", "queries", "queries'", "mask", "mixed")
        given = "mixed"
        # Gradients of queries, keys and values are made apart, then put into one.
        values["q, k, v"] = dataclasses.replace(values["qkv"], view=True)
        tape.nodes.append(Node(module, ("qkv",), "q, k, v"))
        making = kernels.block(kernels.mask_bytes) if shape.flash else 0
        tape.nodes.append(Node(module, ("q, k, v",), "mixed", saves, making=making))
        # Of a single head the result is contiguous as it is.
        if kernels.attention_copies and shape.flash and shape.heads > shape.tp:
            given = "projected"
            values[given] = Value(self._bytes(queries), "projection", module)
            tape.nodes.append(Node(module, ("mixed",), given))
        self._linear(tape, module, given, a, parameters["projection"])

    def _scores(self, tape: Tape, heads: int) -> None:
        """Attention that keeps its matrix: probabilities, and with dropout a mask and the product.

        5 a s^2 b of Korthikanti et al. 2022 with dropout in two bytes, 2 a s^2 b without.
        """
        numbers = heads * self.shape.seq
        size = self._bytes(numbers) * (2 if self.shape.dropout else 1)
        size += self._bytes(numbers, 1) if self.shape.dropout else 0
        tape.values["scores"] = Value(size, "attention", "self_attention")

    def _gated(self, tape: Tape, n: str, m: str, parameters: dict[str, int]) -> None:
        wide = self._bytes(self.tokens * self.shape.ffn_size // self.shape.tp)
        values, module = tape.values, "mlp"
        values["gate"] = Value(wide, "MLP gate", module)
        values["silu"] = Value(wide, "MLP activation", module, ACTIVATION)
        values["up"] = Value(wide, "MLP up", module)
        fused = "swiglu" in self.fused
        recipe = () if fused else ("silu",)
        values["product"] = Value(wide, "MLP activation", module, ACTIVATION, recipe)
        values[m] = Value(self.hidden, "MLP down", module)
        self._linear(tape, module, n, "gate", parameters["gate"])
        if not fused:
            tape.nodes.append(Node(module, ("gate",), "silu", ("gate",)))
        self._linear(tape, module, n, "up", parameters["up"])
        factors = ("gate", "up") if fused else ("silu", "up")
        tape.nodes.append(Node(module, factors, "product", factors))
        self._linear(tape, module, "product", m, parameters["down"])

    def _classic(self, tape: Tape, n: str, m: str, parameters: dict[str, int]) -> None:
        wide = self._bytes(self.tokens * self.shape.ffn_size // self.shape.tp)
        values, module = tape.values, "mlp"
        values["up"] = Value(wide, "MLP up", module)
        values["gelu"] = Value(wide, "MLP activation", module, ACTIVATION)
        values[m] = Value(self.hidden, "MLP down", module)
        self._linear(tape, module, n, "up", parameters["up"])
        tape.nodes.append(Node(module, ("up",), "gelu", ("up",)))
        self._linear(tape, module, "gelu", m, parameters["down"])

    def _linear(self, tape: Tape, module: str, x: str, out: str, parameters: int) -> None:
        """A matrix product. Backward makes the gradient of x first, then that of the matrix."""
        working = making = 0
        if self.kernels.half_in_fp32 and self.item == 2:
            working = max(0, 2 * tape.values[x].bytes - parameters, 2 * parameters)
            making = 2 * tape.values[out].bytes
        tape.nodes.append(
            Node(module, (x,), out, (x,), parameters=parameters, working=working, making=making)
        )

    def _residual(self, tape: Tape, x: str, added: str, out: str, module: str) -> None:
        if self.shape.dropout:
            dropped = f"{added}.dropped"
            self._dropout(tape, added, dropped, module)
            added = dropped
        tape.values[out] = Value(self.hidden, "norm", "post_attention_norm")
        tape.nodes.append(Node(module, (x, added), out, passes=True))

    def _dropout(self, tape: Tape, x: str, out: str, module: str) -> None:
        elements = self.rows * self.shape.hidden
        size = 1 if self.kernels.dropout_in_one else self.item
        tape.values[out] = Value(self.hidden, "dropout", module)
        tape.values[f"{x}.mask"] = Value(
            self._bytes(elements, size), "dropout", f"{module} dropout"
        )
        tape.nodes.append(Node(module, (x,), out, (f"{x}.mask",)))

    def _bytes(self, elements: int, item: int | None = None) -> int:
        return self.kernels.block(elements * (self.item if item is None else item))
