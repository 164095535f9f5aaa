"""Functions on tensors as graphs: traced and fused by a compiler, or captured and replayed by CUDA."""

from __future__ import annotations

import gc
import hashlib
import logging
import os
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fedhassle.capture import CAPTURE_LOCK
from fedhassle.engine.gpu import operators
from fedhassle.engine.gpu.products import AsProducts, convolves
from fedhassle.engine.gpu.rewriting import Rewriting, rewritable
from fedhassle.files import cache_folder, check_writable

KERNELS = "TORCHINDUCTOR_CACHE_DIR"  # the compiler reads it, and sets it when it is imported


class Flat:
    """A function on trees of tensors, as one on their leaves."""

    def __init__(self, function: Callable[..., Any], trees: Any) -> None:
        self.function = function
        self.given = pytree.tree_structure(trees)
        self.made: pytree.TreeSpec | None = None  # known after a call

    def __call__(self, *leaves: Tensor) -> list[Tensor]:
        """The leaves of the result."""
        result, self.made = pytree.tree_flatten(self.function(*pytree.tree_unflatten(leaves, self.given)))
        return [leaf for leaf in result if leaf is not None]

    def result(self, leaves: Sequence[Tensor]) -> Any:
        """The result that has these leaves; None if there are none."""
        return pytree.tree_unflatten(leaves, self.made) if self.made is not None and leaves else None


class Compiler:
    """Compiles functions on trees of tensors to fused kernels; equal graphs of operations only once."""

    def __init__(self) -> None:
        self._fused: dict[Hashable, Callable[..., Any]] = {}
        # It warns of each matrix product that it cannot autotune, about which a user can do nothing.
        logging.getLogger("torch._inductor.select_algorithm").setLevel(logging.ERROR)

    def __call__(
        self, function: Callable[..., Any], *trees: Any, as_products: bool = False
    ) -> Callable[..., Any]:
        """The compiled function, for trees of the same shapes; `as_products`: without convolutions.

        The function is first traced to its operations on tensors, including its backward pass. So it may
        contain any Python, and only the operations are compiled.
        """
        flat, leaves = Flat(function, trees), pytree.tree_leaves(trees)
        graph = traced(flat, leaves)
        if as_products and convolves(graph):
            graph = traced(AsProducts(graph).run, leaves)
        graph = in_fewer_kernels(graph, leaves)
        used = ordered_by_use(graph)
        key = (str(graph.code), tuple(signature(leaves[i]) for i in used), constants(graph))
        if key not in self._fused:
            keep_kernels()
            self._fused[key] = torch.compile(graph, fullgraph=True, dynamic=False)
        fused = self._fused[key]

        def call(*trees: Any) -> Any:
            given = pytree.tree_leaves(trees)
            return flat.result(fused(*[given[i] for i in used]))

        return call


def keep_kernels() -> None:
    """Keeps compiled kernels in the user's cache folder, for later processes.

    The compiler's own choice is a folder for temporary files, which a restart empties. It remains if ours
    cannot be written, and so does a choice of the user's.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # imports the compiler

    if os.environ.get(KERNELS) not in (None, default_cache_dir()):
        return
    with suppress(OSError, RuntimeError):
        # The compiler knows our operations by their names alone, so other code of theirs has another folder.
        ours = hashlib.sha256(Path(operators.__file__).read_bytes()).hexdigest()
        folder = cache_folder() / "kernels" / ours[:8]
        check_writable(folder)
        os.environ[KERNELS] = str(folder)


def traced(function: Callable[..., Any], inputs: Sequence[Tensor]) -> GraphModule:
    """The operations of a function on tensors, as a graph."""
    with enable_python_dispatcher():  # shows BatchNorm as an operation that updates its statistics
        return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def in_fewer_kernels(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    """The graph with BatchNorm rewritten to our own operations, where that is faster."""
    return traced(Rewriting(graph).run, inputs) if rewritable(graph) else graph


def ordered_by_use(graph: GraphModule) -> list[int]:
    """Removes unused nodes, then orders and names the inputs by their first use.

    So functions with the same operations on tensors of other names become the same graph. Returns the old
    index of each remaining input.
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
    """The properties of a tensor that kernels depend on."""
    return (tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)


def constants(graph: GraphModule) -> Hashable:
    """Identities of the constant tensors in a graph, such as those of the views, in order."""
    held = (getattr(graph, str(node.target)) for node in graph.graph.nodes if node.op == "get_attr")
    return tuple(id(tensor) for tensor in held)


class UncapturableError(RuntimeError):
    """A step that cannot be captured in a graph."""


class SyncDetector(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises at operations that make the host wait for the GPU, which a capture does not allow."""

    def __torch_dispatch__(
        self, operation: OpOverload, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs an operation; raises if it waits."""
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        result = operation(*args, **(kwargs or {}))
        made = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
        devices = {tensor.device.type for tensor in (*given, *made) if tensor.dim()}
        masks = any(tensor.dtype == torch.bool for tensor in given)
        sized_by_data = torch.Tag.dynamic_output_shape in operation.tags
        sized_by_data &= masks or operation is not torch.ops.aten.index.Tensor
        if torch.Tag.data_dependent_output in operation.tags or sized_by_data or len(devices) > 1:
            raise UncapturableError(f"{operation} waits for a value on the device")
        return result


def captured(run: Callable[[], None], pool: Any) -> Callable[[], None]:
    """Captures the work of `run` on the current stream; returns a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with CAPTURE_LOCK.capturing(), no_garbage_collection():
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
        except BaseException:
            with suppress(RuntimeError):  # the first error matters, not the failed capture
                graph.capture_end()
            raise
        graph.capture_end()
    return graph.replay


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Turns garbage collection off: freeing a graph invalidates the capture of another."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
