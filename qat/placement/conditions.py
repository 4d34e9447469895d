"""The questions that rules ask about an operation."""

from __future__ import annotations

from typing import Any

from qat.placement.decisions import Decision, Placement, leave_float
from qat.placement.graph import Graph, Node, Value

MIN_CHANNELS = 16
"""Fewer channels, or a smaller K or N of a product, run faster in FP16 (NVIDIA's heuristics)."""
MAX_SEQUENCE = 512
"""Longest sequence with a fused INT8 attention kernel."""
_LOGITS_PASS = ("reshape", "slice", "identity", "softmax", "resize", "nearest", "mean", "global_pool", "activation",
                "other", "sigmoid", "concat", "mul")  # fmt: skip
_UPSAMPLING = ("nearest", "resize", "conv_transpose")


def _weight(node: Node) -> tuple[int, ...]:
    """Shape of the weight of a convolution or linear operation."""
    return node.inputs[1].shape if node.functional else tuple(node.module.weight.shape)  # type: ignore[arg-type]


def _groups(node: Node) -> int:
    return int(node.arguments.get(6, node.arguments.get("groups", 1)) if node.functional else node.module.groups)  # type: ignore[arg-type]


def _channels(node: Node) -> tuple[int, int]:
    """Input and output channels."""
    shape, groups = _weight(node), _groups(node)
    return (shape[0], shape[1] * groups) if node.op == "conv_transpose" else (shape[1] * groups, shape[0])


def is_grouped(node: Node, placement: Placement) -> bool:
    """A convolution in groups of more than one channel."""
    groups = _groups(node)
    return groups > 1 and groups != _channels(node)[0]


def has_few_channels(node: Node, placement: Placement) -> bool:
    """A convolution with fewer than 16 channels on either side."""
    return min(_channels(node)) < MIN_CHANNELS


def is_small_matmul(node: Node, placement: Placement) -> bool:
    """A product whose K or N is under 16."""
    if node.op == "linear":
        return min(_weight(node)) < MIN_CHANNELS
    if is_attention_product(node, placement):
        return False
    return min(node.inputs[1].shape[-2:]) < MIN_CHANNELS if len(node.inputs[1].shape) > 1 else True


def reads_pooled_map(node: Node, placement: Placement) -> bool:
    """A convolution on a map that global pooling, or attention over all of it, has made 1x1."""
    x = node.inputs[0]
    if any(size != 1 for size in x.spatial):
        return False
    stop = ("global_pool", "mul", "add", "concat")
    return any(n.op == "global_pool" or _pools_by_softmax(n) for n in placement.graph.producers(x, stop))


def _pools_by_softmax(node: Node) -> bool:
    """A sum over all places of a map, weighted by one softmax (the context of GCNet)."""
    return node.op == "matmul" and softmax_behind(node) is not None and min(node.outputs[0].shape[-2:]) == 1


def is_gate(node: Node, placement: Placement) -> bool:
    """A layer between a global pooling and a product with the whole map."""
    graph, x = placement.graph, node.inputs[0]
    if not any(
        n.op in ("global_pool", "mean") for n in graph.producers(x, stop=("global_pool", "mean", "add", "concat"))
    ):
        return False
    if len(x.shape) not in (2, 3) and any(size != 1 for size in x.spatial):
        return False
    out = node.outputs[0]
    for reader, _ in graph.readers(out, stop=("mul", "add", "concat")):
        if reader.op == "mul" and is_gating(reader, placement):
            return True
    return False


def is_gating(node: Node, placement: Placement) -> bool:
    """A product of two activations."""
    return sum(value.is_activation for value in node.inputs) == 2


def gives_logits(node: Node, placement: Placement) -> bool:
    """A linear layer or 1x1 convolution from which only shapes, pooling and activations lead to an output.

    So do products, sums with constants and concats, by which a detector turns the maps of its heads into boxes.
    Behind an upsampling any convolution: the head of a network for dense prediction, such as a U-Net's, may be 3x3.
    """
    graph = placement.graph
    reached = [node.outputs[0]]
    for reader, _ in graph.readers(node.outputs[0], stop=()):
        shifts = reader.op == "add" and sum(value.is_activation for value in reader.inputs) == 1
        if reader.op not in _LOGITS_PASS and not shifts:
            return False
        reached += reader.outputs
    if not any(value in graph.outputs for value in reached):
        return False
    pointwise = node.op == "linear" or all(size == 1 for size in _weight(node)[2:])
    return pointwise or _is_behind_upsampling(node, graph)


def _is_behind_upsampling(node: Node, graph: Graph) -> bool:
    return any(producer.op in _UPSAMPLING for producer in graph.producers(node.inputs[0], stop=()))


def softmax_behind(node: Node) -> tuple[Node, int] | None:
    """The softmax that a product reads through dropout and shapes, and as which operand."""
    for operand, read in enumerate(node.inputs):
        value = read
        while value.producer is not None and value.producer.op in ("identity", "reshape"):
            value = value.producer.inputs[0]
        if value.producer is not None and value.producer.op == "softmax":
            return value.producer, operand
    return None


def _scores_behind(softmax: Node, placement: Placement) -> Node | None:
    """The product of queries and keys that a softmax reads, through scaling, masks and biases."""
    graph = placement.graph
    stop = ("matmul", "softmax", "linear", "conv", "attention")
    return next((n for n in graph.producers(softmax.inputs[0], stop) if n.op == "matmul"), None)


def is_attention_product(node: Node, placement: Placement) -> bool:
    """One of the two products of an attention."""
    return _attention_products(node, placement) is not None


def _attention_products(node: Node, placement: Placement) -> tuple[Node, Node] | None:
    """(queries by keys, probabilities by values) where `node` is one of them."""
    if node.op != "matmul" or len(node.inputs) != 2:
        return None
    found = softmax_behind(node)
    if found is not None:
        scores = _scores_behind(found[0], placement)
        return None if scores is None else (scores, node)
    stop = ("matmul", "linear", "conv", "attention")
    for reader, _ in placement.graph.readers(node.outputs[0], stop):
        found = softmax_behind(reader) if reader.op == "matmul" else None
        if found is not None and _scores_behind(found[0], placement) is node:
            return node, reader
    return None


def attention_as_a_whole(node: Node, placement: Placement) -> Decision | None:
    """Queries, keys, probabilities and values all in INT8, or none of them."""
    if node.op == "matmul":
        products = _attention_products(node, placement)
        if products is None:
            return None
        scores, context = products
        found = softmax_behind(context)
        assert found is not None
        # Some write values @ probabilities, both transposed.
        sizes = context.inputs[1 - found[1]].shape[-2:]
        length, width = sizes if found[1] == 0 else reversed(sizes)
        reason = _attention_size(length, width) or _attention_size(
            scores.inputs[1].shape[-1], scores.inputs[0].shape[-1]
        )
        if reason:
            return leave_float(reason)
        part = Decision(True, operands=(0, 1), private=True)
        peers = tuple((product, part) for product in products)
        return Decision(True, operands=(0, 1), private=True, peers=peers)
    if node.op == "attention":
        length, width = node.inputs[1].shape[-2:]
        reason = _attention_size(length, width)
        return leave_float(reason) if reason else Decision(True, operands=(0, 1, 2), private=True)
    return _multihead_attention(node)


def _multihead_attention(node: Node) -> Decision:
    """Projections in INT8 like any linear layer; the products between them by the rule for attention."""
    m: Any = node.module
    if m.embed_dim < MIN_CHANNELS:
        return leave_float(f"attention of width {m.embed_dim}: K or N under {MIN_CHANNELS} is slower in INT8")
    keys = node.inputs[1].shape
    length = keys[0] if len(keys) == 2 or not m.batch_first else keys[1]
    return Decision(True, operands=(0, 1, 2), reason=_attention_size(length, m.head_dim))


def _attention_size(length: int, width: int) -> str:
    if length > MAX_SEQUENCE:
        return f"attention over a sequence of {length} tokens: INT8 kernels end at {MAX_SEQUENCE}"
    if min(length, width) < MIN_CHANNELS:
        return f"attention over {length} tokens of width {width}: K or N under {MIN_CHANNELS} is slower in INT8"
    return ""


def residual_add(node: Node, placement: Placement) -> Decision | None:
    """Quantize the identity; TensorRT adds the other operand inside the layer that computes it."""
    if len(node.inputs) != 2:
        return None
    first, second = node.inputs
    if not (first.is_activation and second.is_activation) or first.shape != second.shape or first is second:
        return None
    if _layers_behind(first, placement) == _layers_behind(second, placement) != set():
        return leave_float("both operands come from the same layer: a part of its activation, and no residual")
    identity = _identity(first, second, placement)
    branch = node.inputs[1 - identity]
    if not placement.from_int8(branch):
        return leave_float("the branch added to the identity does not come from an INT8 layer")
    return Decision(True, operands=(identity,))


def _layers_behind(value: Value, placement: Placement) -> set[Node]:
    return {node for node in placement.graph.producers(value) if node.weighted}


def _identity(first: Value, second: Value, placement: Placement) -> int:
    """The operand that no layer can add in its kernel, else only a float one; of equals that of the least depth."""
    fusible = [_fusible(placement.layer_before(value), placement) for value in (first, second)]
    if fusible[0] != fusible[1]:
        return fusible.index(min(fusible))
    if first.depth != second.depth:
        return 0 if first.depth < second.depth else 1
    return 0 if not placement.from_int8(first) else 1


def _fusible(layer: Node | None, placement: Placement) -> int:
    """How well an add goes into the kernel of the layer in front of it: 0 not at all, 1 in float, 2 in INT8."""
    return 0 if layer is None else 1 + placement.quantizes(layer, 0)


def concat(node: Node, placement: Placement) -> Decision | None:
    """One scale for every input: that of what reads the result in INT8, else one of the result's own."""
    if not all(value.floating for value in node.inputs) or sum(v.is_activation for v in node.inputs) < 2:
        return None
    out = node.outputs[0]
    if len(out.shape) < 3:
        return leave_float("it joins vectors, not maps")
    if placement.read_in_int8(out):
        return Decision(True, operands=())
    if not placement.leads_to_int8(out) or not any(placement.from_int8(v) for v in node.inputs):
        return leave_float("no INT8 layer stands on both sides of it")
    return Decision(True, operands=(), result=True)


def average_pooling(node: Node, placement: Placement) -> Decision | None:
    """In and out, or not at all: the input is quantized where everything reads the output in INT8."""
    if placement.read_only_in_int8(node.outputs[0]):
        return Decision(True, operands=(0,))
    return leave_float("something reads its output in float, and pooling in INT8 needs scales on both sides")
