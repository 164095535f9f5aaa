"""Rewrites traced steps to fewer kernels: BatchNorm uses our own sums, or is folded into its convolution.

A compiler generates three to five kernels for each sum over a batch, and cannot fuse anything into cuDNN's
convolutions: together a third of a step. Operations that match no rule stay unchanged.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node

from fedhassle.engine.gpu.operators import convolve_relu, gradient_sums, moments, per_channel, standardised

aten: Any = torch.ops.aten
LEARNING = aten._native_batch_norm_legit.default  # in training
FROZEN = aten._native_batch_norm_legit_no_training.default
DEVICES = {"cuda"}  # where rewriting is faster


class Rewriting(Interpreter):
    """Runs the operations of a graph, with those that match a rule replaced."""

    def __init__(self, graph: GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)  # rules read earlier values
        self._moments: dict[Node, Tensor] = {}  # of each BatchNorm in training

    def run_node(self, node: Node) -> Any:
        """The value of a node."""
        rule = RULES.get(node.target) if node.op == "call_function" else None
        made = None if rule is None else rule(self, node)
        return super().run_node(node) if made is None else made

    def values(self, node: Node) -> Any:
        """The arguments of a node."""
        return self.fetch_args_kwargs_from_env(node)[0]

    def normalise(self, node: Node) -> tuple[Tensor, ...] | None:
        """BatchNorm in training, which updates its statistics."""
        x, gain, shift, mean, variance, training, momentum, eps = self.values(node)
        if not training or gain is None or not suits(x):
            return None
        now = self._moments[node] = moments(x, mean, variance, momentum, eps)
        made = standardised(x, now) * per_channel(gain) + per_channel(shift)
        return made.to(x.dtype), now[0], now[1]

    def normalise_backward(self, node: Node) -> tuple[Tensor, ...] | None:
        """The gradients of a BatchNorm in training, and of a ReLU directly after it."""
        norm = source(node.args[5])
        if norm not in self._moments:
            return None
        gradient, x, gain = self.values(node)[:3]
        shift, now = self.values(norm)[2], self._moments[norm]
        normal, pixels = standardised(x, now), x.numel() // x.shape[1]
        before = ungated(node.args[0], norm)
        if before is None:
            sums = gradient_sums(gradient, x, now, None, None)
        else:  # the ReLU's mask is recomputed from its input: one tensor less to read
            sums = gradient_sums(self.env[before], x, now, gain, shift)
            open_ = normal * per_channel(gain) + per_channel(shift) > 0
            gradient = torch.where(open_, self.env[before], 0)
        level, tilt = sums / pixels
        even = gradient.float() - per_channel(level) - normal * per_channel(tilt)
        return (even * per_channel(now[1] * gain)).to(x.dtype), sums[1], sums[0]

    def rectify(self, node: Node) -> Tensor | None:
        """ReLU with the convolution and frozen BatchNorm before it, and with an addition between them."""
        given: Any = node.args[0]
        if given.target is not aten.add.Tensor:
            return self.convolve(given, None)
        one, other = given.args[:2]
        if given.kwargs or not isinstance(other, Node):
            return None
        made = self.convolve(one, self.env[other])
        return self.convolve(other, self.env[one]) if made is None else made

    def convolve(self, normed: Node, other: Tensor | None) -> Tensor | None:
        """ReLU(normed + other), where `normed` is a frozen BatchNorm of a convolution; otherwise None."""
        norm = source(normed)
        before: Any = norm.args[0] if norm.target is FROZEN else None
        if before is None or before.target is not aten.convolution.default:
            return None
        x, kernel, bias, stride, padding, dilation, transposed, _, groups = self.values(before)
        _, gain, shift, mean, variance, _, eps = self.values(norm)
        plain = bias is None and not transposed and groups == 1 and set(dilation) == {1}
        if not plain or gain is None or not suits(x) or x.dtype != torch.bfloat16:
            return None
        made = self.env[before]
        if other is not None and (other.shape, other.dtype) != (made.shape, made.dtype):
            return None  # cuDNN only adds tensors of the same shape and type
        factor = gain * torch.rsqrt(variance + eps)
        kernel = (kernel * factor[:, None, None, None]).to(x.dtype)
        made = convolve_relu(x, kernel, (shift - mean * factor).to(x.dtype), other, stride, padding)
        assert isinstance(made, Tensor)
        return made


RULES: dict[Any, Callable[[Rewriting, Node], Any]] = {
    LEARNING: Rewriting.normalise,
    aten.native_batch_norm_backward.default: Rewriting.normalise_backward,
    aten.relu.default: Rewriting.rectify,
}


def rewritable(graph: GraphModule) -> bool:
    """True if the graph contains a BatchNorm that can be rewritten."""
    norms = [node for node in graph.graph.nodes if node.target in (LEARNING, FROZEN)]
    return any(suits(node.args[0].meta["val"]) for node in norms)


def suits(x: Tensor) -> bool:
    """True for feature maps that our operations support."""
    if x.device.type not in DEVICES or x.dim() != 4 or x.numel() >= 2**31:
        return False
    return x.is_contiguous(memory_format=torch.channels_last)


def source(value: Any) -> Any:
    """The operation that produced a value, or a tuple that contains it."""
    while isinstance(value, Node) and value.target in (aten.detach.default, operator.getitem):
        value = value.args[0]
    return value


def ungated(gradient: Any, norm: Node) -> Node | None:
    """The gradient before the mask of a ReLU, if the ReLU directly follows this BatchNorm."""
    if gradient.target is not aten.threshold_backward.default:
        return None
    before, gate, threshold = gradient.args
    relu = source(gate)
    behind = relu.target is aten.relu.default and source(relu.args[0]) is norm
    return before if behind and threshold == 0 and isinstance(before, Node) else None
