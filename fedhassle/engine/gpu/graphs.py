"""Functions on tensors as graphs: traced and fused by a compiler, or captured by CUDA and replayed."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedhassle.engine.gpu.rewriting import Rewriting, rewritable
from fedhassle.engine.gpu.sharing import QUIET


class Compiler:
    """Functions on trees of tensors as fused kernels; what makes the same operations is compiled once."""

    def __init__(self) -> None:
        self._fused: dict[Hashable, Callable[..., Any]] = {}
        # It warns of each matrix product whose ways it cannot compare by time: nothing for a user to mend.
        logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.ERROR)

    def __call__(self, function: Callable[..., Any], *trees: Any) -> Callable[..., Any]:
        """The function, for trees of the same shapes.

        It is first traced down to the operations that it makes on tensors, its backward pass included: so
        it may be any Python, and nothing but those operations is compiled.
        """
        leaves, spec = pytree.tree_flatten(trees)
        made: list[Any] = []  # the shape of what it returns

        def flat(*leaves: Tensor) -> list[Tensor]:
            result, shape = pytree.tree_flatten(function(*pytree.tree_unflatten(leaves, spec)))
            made[:] = [shape]
            return [leaf for leaf in result if leaf is not None]

        graph = in_fewer_kernels(traced(flat, leaves), leaves)
        used = ordered_by_use(graph)
        key = (str(graph.code), tuple(signature(leaves[i]) for i in used), constants(graph))
        if key not in self._fused:
            self._fused[key] = torch.compile(graph, fullgraph=True, dynamic=False)
        fused = self._fused[key]

        def call(*trees: Any) -> Any:
            given = pytree.tree_leaves(trees)
            result = fused(*[given[i] for i in used])
            return pytree.tree_unflatten(result, made[0]) if result else None

        return call


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    """The operations that a function makes on tensors."""
    with enable_python_dispatcher():  # BatchNorm as an operation that says that it moves its statistics
        return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def in_fewer_kernels(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    """The same with BatchNorm around operations of our own, where there is any and it pays."""
    return traced(Rewriting(graph).run, inputs) if rewritable(graph) else graph


def ordered_by_use(graph: GraphModule) -> list[int]:
    """Takes out what is not used, then orders and names the inputs by their first use.

    So functions that make the same operations on tensors of other names become the same graph. Returns
    which of the inputs there were are the inputs now.
    """
    for node in reversed(list(graph.graph.nodes)):
        if isinstance(node.target, OpOverload) and not node.users and not node.target._schema.is_mutable:
            graph.graph.erase_node(node)
    nodes = list(graph.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    place = {node: i for i, node in enumerate(inputs)}
    first = dict.fromkeys(node for user in nodes for node in user.all_input_nodes if node in place)
    for node in inputs:
        if node not in first:
            graph.graph.erase_node(node)
    body = next(node for node in graph.graph.nodes if node.op != "placeholder")
    for i, node in enumerate(first):
        body.prepend(node)
        node.name = node.target = f"input_{i}"
    for i, node in enumerate(node for node in nodes if node.op == "call_function"):
        node.name = f"value_{i}"
    graph.recompile()
    return [place[node] for node in first]


def signature(tensor: Tensor) -> Hashable:
    """All of a tensor that kernels depend on."""
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)


def constants(graph: GraphModule) -> Hashable:
    """The tensors that a graph holds: those of the views, and the like, each at its place."""
    held = (getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr")
    return tuple(id(tensor) for tensor in held)


class UncapturableError(RuntimeError):
    """A step that no graph can hold."""


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at operations for which the host waits for the GPU, before a capture stumbles over them."""

    def __torch_dispatch__(
        self, operation: OpOverload, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Makes an operation, if it goes without waiting."""
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        result = operation(*args, **(kwargs or {}))
        made = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
        devices = {tensor.device.type for tensor in (*given, *made) if tensor.dim()}
        masks = any(tensor.dtype == torch.bool for tensor in given)
        sized_by_data = torch.Tag.dynamic_output_shape in operation.tags
        sized_by_data &= masks or operation is not torch.ops.aten.index.Tensor
        if torch.Tag.data_dependent_output in operation.tags or sized_by_data or len(devices) > 1:
            raise UncapturableError(f"{operation} waits for what is on the device")
        return result


def captured(run: Callable[[], None], pool: Any) -> Callable[[], None]:
    """What `run` does on the current stream, as a graph to replay."""
    graph = torch.cuda.CUDAGraph()
    with QUIET.kept(), no_garbage_collected():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # that the capture is spoilt is known; why is what matters
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay


@contextmanager
def no_garbage_collected() -> Iterator[None]:
    """A graph that is freed while another is being captured spoils it."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
