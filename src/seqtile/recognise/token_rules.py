"""Rules of operators: how token dimensions propagate, and the expression computed.

A rule refuses an operator through which one token sees another. An operator without a rule proves nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from seqtile._compat import ALL_TRUE, FakeTensor, disable_current_modes
from seqtile.counting.watch import tensors_in
from seqtile.recognise.sizes import SIZES, NoRule, NotPerToken, Untraceable, holds_tokens
from seqtile.recognise.token_flow import Atoms, Call, Flow, features, place_of

# -- element by element ----------------------------------------------------------------------------------------------

_ALL = ("add", "sub", "where", "rsub")
"""Operators that are linear in all operands together."""


def pointwise(call: Call) -> list[Flow]:
    """Operators that compute each element from the elements at the same place."""
    args, number = call.args, call.expressions
    gradients = [name for name in args if name.startswith("grad")] if call.name.endswith("_backward") else []
    operands = (
        ("self", "other") if call.name in (*_ALL, "mul") else ("self",) if call.name in ("div", "neg") else gradients
    )
    summed = call.is_sum(*operands, all_of_them=call.name in _ALL)
    if summed and not _is_linear(call):
        raise call.mixes("of a sum over tokens and something else")
    left, right = (call.flow(v) if isinstance(v, Tensor) else v for v in (args.get("self"), args.get("other")))
    if call.name in ("add", "mul") and args.get("alpha", 1) == 1:
        return [call.flow_of(call.out[0], number.joined(call.name, (left, right)), summed)]
    if call.name == "div" and args.get("rounding_mode") is None and right == 1 and isinstance(left, Flow):
        return [call.flow_of(call.out[0], left.expr, summed)]
    if _always(call):
        same = left.expr if call.name == "clamp" and isinstance(left, Flow) else number.number("always")
        same = left.expr if call.name == "where" and isinstance(left, Flow) else same
        return [call.flow_of(call.out[0], same, summed)]
    return [call.flow_of(out, call.expr(index), summed) for index, out in enumerate(call.out)]


def _is_linear(call: Call) -> bool:
    """Whether the numbers among the arguments leave an operator linear in its operands: no constant, no rounding."""
    numbers = [call.args.get(name) for name in ("self", "other")]
    constant = any(isinstance(value, (bool, int, float, complex)) and value != 0 for value in numbers)
    out = call.out[0]
    return not (
        (call.name in _ALL and constant) or call.args.get("rounding_mode") is not None
        or not (out.is_floating_point() or out.is_complex())
    )  # fmt: skip


def _always(call: Call) -> bool:
    """Whether the operator is a clamp with infinite bounds, which changes nothing, or belongs to its backward.

    A comparison in the forward is none of these: code may compare with infinity to detect values that are not finite.
    """
    always = call.expressions.number("always")
    args = {name: None if isinstance(value, Tensor) else value for name, value in call.args.items()}
    if call.name == "clamp" and len(call.flows()) == 1:
        return args.get("min") in (None, -math.inf) and args.get("max") in (None, math.inf)
    if not call.in_backward:
        return False
    if call.name in ("ge", "le"):
        return args.get("other") == (-math.inf if call.name == "ge" else math.inf)
    masks = call.flows("condition") if call.name == "where" else call.flows() if call.name == "logical_and" else []
    return bool(masks) and all(flow.expr == always for flow in masks)


# -- layout ----------------------------------------------------------------------------------------------------------


def same(call: Call) -> list[Flow]:
    """Copies and conversions, of which only a change of dtype is a computation."""
    tensor, flow = call.first, call.flow(call.first)
    changed = tensor.dtype != call.out[0].dtype
    if flow.summed and not (call.out[0].is_floating_point() or call.out[0].is_complex()):
        raise call.mixes("rounds a sum over tokens")
    return [replace(flow, expr=call.expressions.number("to", flow.expr, call.out[0].dtype) if changed else flow.expr)]


def literal(call: Call) -> list[Flow]:
    """A tensor of numbers that are written in the code."""
    values = call.first
    if isinstance(values, FakeTensor):
        return same(call)
    key = ("literal", tuple(values.shape), str(values.dtype), str(numbers_in(values)))
    return [Flow(((),) * values.dim(), call.expressions.number(*key))]


def numbers_in(values: Tensor) -> Any:
    """The values of a tensor whose numbers are written in the code."""
    if isinstance(values, FakeTensor):
        return None
    if values.numel() > 1000:
        raise Untraceable(f"it makes a tensor of {values.numel():,} numbers, too many to compare")
    with disable_current_modes():  # they are real
        numbers = values.flatten().tolist()
    finite = [number for number in numbers if isinstance(number, (int, float)) and math.isfinite(number)]
    if any(number == int(number) and holds_tokens(int(number)) for number in finite):
        raise NotPerToken("its forward computes with the number of tokens")
    return numbers


def reshaped(call: Call) -> list[Flow]:
    """Views of other sizes: a token dimension must stay whole, alone or joined with its neighbours."""
    tensor, out, flow = call.first, call.out[0], call.flow(call.first)
    if tensor.dtype != out.dtype:  # other numbers of the same bits
        if flow.summed:
            raise call.mixes("reads the bits of a sum over tokens")
        if tensor.shape != out.shape:
            raise NoRule(f"it uses {call.name} with another dtype, which cannot be traced")
        return [replace(flow, expr=call.expressions.number("bits", flow.expr, out.dtype))]
    atoms = [
        atom for size, inside in zip(tensor.shape, flow.dims, strict=True) for atom in inside or (size,) if atom != 1
    ]
    dims: list[Atoms] = []
    for size in out.shape:
        taken: list[str | int] = []
        while size > 1:
            first = atoms[0]
            room = first if isinstance(first, int) else SIZES[first]
            if size % room == 0:
                taken, size = [*taken, atoms.pop(0)], size // room
            elif isinstance(first, int) and room % size == 0:
                taken, atoms[0], size = [*taken, size], room // size, 1
            else:
                raise call.mixes("splits or scrambles them")
        dims.append(tuple(taken) if any(isinstance(atom, str) for atom in taken) else ())
    features_before, features_after = features(tensor, flow.dims), features(out, dims)
    expr = (
        flow.expr
        if features_before == features_after
        else call.expressions.number("reshape", flow.expr, features_after)
    )
    return [replace(flow, dims=tuple(dims), expr=expr)]


def permuted(call: Call) -> list[Flow]:
    """Dimensions in another order."""
    tensor, count = call.first, call.first.dim()
    flow, order = call.flow(tensor), list(range(count))
    if call.name == "permute":
        order = [dim % count for dim in call.args["dims"]]
    elif count > 1:
        first, second = (call.args.get(name, dim) % count for name, dim in (("dim0", 0), ("dim1", 1)))
        order[first], order[second] = order[second], order[first]
    places = [dim for dim in range(count) if not flow.dims[dim]]
    moved = [places.index(dim) for dim in order if not flow.dims[dim]]
    lead = len(moved) - len(features(tensor, flow.dims))  # dimensions of size 1 that the expression leaves out
    if moved[:lead] == list(range(lead)):
        expr = call.expressions.permuted(flow.expr, [index - lead for index in moved[lead:]])
    else:
        expr = call.expressions.number("permute", flow.expr, tuple(moved), "padded")
    return [replace(flow, dims=tuple(flow.dims[dim] for dim in order), expr=expr)]


def expanded(call: Call) -> list[Flow]:
    """Dimensions of size 1 repeated: never a sum over tokens along them."""
    tensor, flow = call.first, call.flow(call.first)
    wide_flow = call.flow_of(call.out[0], flow.expr, flow.summed)
    if flow.summed and len(wide_flow.axes) > len(flow.axes):
        raise call.mixes("gives a sum over tokens to each of them")
    after = features(call.out[0], wide_flow.dims)
    wider = features(tensor, flow.dims) != after
    expr = call.expressions.number("expand", flow.expr, after) if wider else flow.expr
    return [replace(flow, dims=wide_flow.dims, expr=expr)]


def cut(call: Call) -> list[Flow]:
    """slice, select, split and unbind: equal pieces have equal expressions, whichever operator cuts them."""
    tensor, args, given = call.first, call.args, call.flow(call.first)
    dim = args.get("dim", 0) % max(tensor.dim(), 1)
    size, flows, start = tensor.shape[dim], list[Flow](), 0
    if given.dims[dim]:
        if call.name == "slice" and call.out[0].shape == tensor.shape and (args["end"] or size) in (size, 2**63 - 1):
            return [given]  # all of them, however many
        raise call.mixes("takes some of them")
    for out in call.out:
        dropped, step = out.dim() < tensor.dim(), args.get("step", 1)
        length = 1 if dropped else out.shape[dim]
        if call.name in ("slice", "select"):
            start = args.get("start", args.get("index")) or 0
            start += size if start < 0 else 0
        piece = ("slice", given.expr, place_of(given.dims, dim), start, length, step, dropped)
        whole = length == size and not dropped
        flow = call.flow_of(out, given.expr if whole else call.expressions.number(*piece), given.summed)
        flows.append(replace(flow, root=given.root))
        start += length
    return flows


def placed(call: Call) -> list[Flow]:
    """cat, stack, padding, and the backwards of slice and select: along dimensions without tokens."""
    out = call.out[0]
    dims = [call.args.get("dim", 0) % out.dim()]
    if call.name == "constant_pad_nd":
        dims = [out.dim() - 1 - number // 2 for number, pad in enumerate(call.args["pad"]) if pad]
    summed = call.is_sum("tensors", "self", "grad_output", all_of_them=True)
    if summed and call.args.get("value"):
        raise call.mixes("of a sum over tokens and something else")
    flow = call.flow_of(out, 0, summed)
    if any(flow.dims[dim] for dim in dims):
        raise call.mixes("puts them behind each other")
    places, sizes = tuple(place_of(flow.dims, dim) for dim in dims), tuple(out.shape[dim] for dim in dims)
    plain = [
        value for name, value in call.args.items() if name not in ("dim", "input_sizes") and not tensors_in([value])
    ]
    exprs = tuple(operand.expr for operand in call.flows())
    return [replace(flow, expr=call.expressions.number(call.name, exprs, places, sizes, repr(plain)))]


# -- along a dimension -----------------------------------------------------------------------------------------------


def along(call: Call) -> list[Flow]:
    """Operators that read along dimensions, which must be without tokens; only a plain sum may go over them."""
    tensor, args, flow = call.first, call.args, call.flow(call.first)
    if any(map(holds_tokens, args.get("shifts", ()))):
        raise NotPerToken(f"its forward computes with the number of tokens ({call.name})")
    count = tensor.dim()
    named = next((args[name] for name in ("dim", "dims") if args.get(name) not in (None, [])), list(range(count)))
    if "normalized_shape" in args:
        named = list(range(count - len(args["normalized_shape"]), count))
    over = {dim % max(count, 1) for dim in (named if isinstance(named, (list, tuple)) else [named])} if count else set()
    whole = sorted(dim for dim in over if flow.dims[dim])
    if whole and call.name != "sum":
        raise call.mixes("is taken over them")
    linear = (
        ("self",) if call.name in ("sum", "mean", "cumsum", "flip") else tuple(n for n in args if n.startswith("grad"))
    )
    summed = call.is_sum(*linear) or bool(whole)
    shape = features(tensor, flow.dims) if whole else ()
    weights = "normalized_shape" in args and call.name.endswith("_backward")  # their gradients are sums over tokens
    places = tuple(sorted(place_of(flow.dims, dim) for dim in over - set(whole)))
    plain = replace(call, args={name: value for name, value in args.items() if name not in ("dim", "dims")})
    return [
        call.flow_of(out, plain.expr(places, bool(whole), number, shape), summed or (weights and number > 0))
        for number, out in enumerate(call.out)
    ]


def put(call: Call) -> list[Flow]:
    """``table.index_put(indices, values)`` of weights: the gradient of a table that is looked up."""
    if any(flow.axes for flow in call.flows()):
        raise call.mixes("puts some of them elsewhere")
    return [call.flow_of(call.out[0], call.expr(), call.is_sum("values"))]


def looked_up(call: Call) -> list[Flow]:
    """``table[index]``: an index per token into a constant, constant indices into features, or ``gather``."""
    table: Any
    table, gather = call.args.get("weight", call.args.get("self")), call.name in ("gather", "scatter", "scatter_add")
    indices = call.args["indices"] if call.name == "index" else [call.args["index" if gather else "indices"]]
    used = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    table_flow, flows = call.flow(table), call.flows()
    if any(flow.summed for flow in flows) and not any(flow.axes for flow in flows):  # the gradient of a weight
        return [
            call.flow_of(call.out[0], call.expr(), call.is_sum("src" if call.name.startswith("scatter") else "self"))
        ]
    if len(used) != 1 or any(flow.summed for flow in call.flows()):
        raise NoRule(f"it uses {call.name} with {len(used)} indices, which cannot be traced")
    dim, index = (call.args["dim"] if gather else used[0][0]), used[0][1]
    if call.name.startswith("scatter") and any(set(flow.axes) - set(table_flow.axes) for flow in call.flows()):
        raise call.mixes("adds them up")
    if table_flow.dims[dim] or (
        table_flow.axes and (call.flow(index).dims != table_flow.dims if gather else call.flow(index).axes)
    ):
        raise call.mixes("picks some of them")
    return [call.flow_of(call.out[0], call.expr(place_of(table_flow.dims, dim)))]


# -- products --------------------------------------------------------------------------------------------------------

_FACTORS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "mv": ("self", "vec"), "dot": ("self", "tensor"),
            "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2"), "addmv": ("mat", "vec")}  # fmt: skip


def product(call: Call) -> list[Flow]:
    """Matrix products: with weights per token, or the sum over tokens that is a gradient of a weight."""
    args, number = call.args, call.expressions
    left, right = (args[name] for name in _FACTORS[call.name])
    left_flow, right_flow = call.flow(left), call.flow(right)
    inner = left_flow.dims[-1]
    if inner != right_flow.dims[-2 if right.dim() > 1 else -1]:
        raise call.mixes("multiplies along them")
    batch = set(Flow(left_flow.dims[: left.dim() - 2], 0).axes)
    if (set(left_flow.axes) & set(right_flow.axes)) - batch != set(Flow((inner,), 0).axes) or (inner and batch):
        raise call.mixes("of every pair of them")
    if (left_flow.summed and (right_flow.summed or right_flow.axes)) or (right_flow.summed and left_flow.axes):
        raise call.mixes("with a sum over tokens")
    flat = left.dim() <= 2 or (left.shape[0] == 1 and right.shape[0] == 1)
    where = () if flat else (left_flow.dims, right_flow.dims)
    summed = left_flow.summed or right_flow.summed or bool(inner)
    if inner and left.dim() > 1 < right.dim():  # [K, tokens] @ [tokens, N]
        order = sorted((left_flow.expr, right_flow.expr)) if flat else [left_flow.expr, right_flow.expr]
        expr = number.number("outer", *order, *where)
        expr = expr if order == [left_flow.expr, right_flow.expr] else number.permuted(expr, (1, 0))
    elif (
        flat and right.dim() > 1 and right_flow.axes and not left_flow.axes
    ):  # [N, K] @ [K, tokens]: the other way round
        expr = number.number("mm", right_flow.expr, number.permuted(left_flow.expr, (1, 0)))
    else:
        expr = number.number("mm", left_flow.expr, right_flow.expr, *where)
    flow = call.flow_of(call.out[0], expr, summed)
    if "beta" not in args:
        return [flow]
    added = call.flow(args["self"])
    if added.summed != summed or args.get("alpha", 1) != 1 or args["beta"] != 1:
        raise NoRule(f"it uses {call.name} with factors, which cannot be traced")
    return [replace(flow, expr=number.joined("add", (added, flow)))]


def weight_normed(call: Call) -> list[Flow]:
    """A weight from its length and direction; the backward is linear in its gradient."""
    if any(flow.axes for flow in call.flows()):
        raise call.mixes("is taken over them")
    summed = call.is_sum("grad_w")
    return [call.flow_of(out, call.expr(number), summed) for number, out in enumerate(call.out)]


def convolved(call: Call) -> list[Flow]:
    """A convolution whose kernel has one element is a linear layer at every place."""
    args, weight = call.args, call.args["weight"]
    plain = all(size == 1 for size in (*args["stride"], *weight.shape[2:])) and not any(args["padding"])
    if (
        not plain
        or args["transposed"]
        or args["groups"] != 1
        or call.flow(call.first).dims[1]
        or call.flow(weight).axes
        or call.flow(weight).summed
    ):
        raise call.mixes("goes over several of them")
    return [call.flow_of(out, call.expr(number), number > 0) for number, out in enumerate(call.out)]


# -- what is made, drawn or written ----------------------------------------------------------------------------------


def made(call: Call) -> list[Flow]:
    """Tensors of one value: their shape shows the token dimensions."""
    value: Any = {"zeros": 0, "zero": 0, "ones": 1}.get(call.name.removeprefix("new_").removesuffix("_like").strip("_"))
    value = call.args.get("fill_value", call.args.get("value", value))
    if isinstance(value, Tensor):
        if call.flow(value).summed or call.flow(value).axes:
            raise call.mixes("with a value of theirs")
        value = ("expression", call.flow(value).expr)
    value = call.expressions.unique() if value is None else value
    flow = call.flow_of(call.out[0], 0)
    return [
        replace(
            flow, expr=call.expressions.number("constant", value, features(call.out[0], flow.dims), call.out[0].dtype)
        )
    ]


def counted_up(call: Call) -> list[Flow]:
    """Tensors of consecutive numbers, which must not be as long as the number of tokens."""
    if call.flow_of(call.out[0], 0).axes:
        raise NotPerToken("its forward depends on the position of a token")
    return [call.flow_of(call.out[0], call.expr())]


def dropped(call: Call) -> list[Flow]:
    """Dropout's masks: every token must have random numbers of its own."""
    flow = call.flow(call.first)
    if set(flow.axes) != call.axes:
        raise NotPerToken("it draws random numbers that several tokens share, or that belong to none")
    if call.name == "bernoulli_":
        shape = features(call.first, flow.dims)
        return [replace(flow, expr=call.expressions.number("bernoulli", call.args.get("p"), shape))]
    return [call.flow_of(out, call.expr(number)) for number, out in enumerate(call.out)]


def copied(call: Call) -> list[Flow]:
    """``copy_``: the old content is overwritten."""
    tensor, source = call.args["self"], call.flow(call.args["src"])
    flow = call.flow_of(tensor, source.expr, source.summed)
    if source.summed and flow.axes:
        raise call.mixes("gives a sum over tokens to each of them")
    same_shape = features(tensor, flow.dims) == features(call.args["src"], source.dims)
    expr = source.expr if same_shape else call.expr()
    cast = tensor.dtype != call.args["src"].dtype
    if source.summed and not (tensor.is_floating_point() or tensor.is_complex()):
        raise call.mixes("rounds a sum over tokens")
    return [replace(flow, expr=call.expressions.number("to", expr, tensor.dtype) if cast else expr)]


def refusing(why: str) -> TokenRule:
    """The rule of operators that refuse tokens: ``why`` completes the sentence."""

    def rule(call: Call) -> list[Flow]:
        if any(flow.axes or flow.summed for flow in call.flows()):
            raise call.mixes(why)
        raise NoRule(f"it uses {call.name} of a weight, which cannot be traced")

    return rule


def attended(call: Call) -> list[Flow]:
    """Attention: of tokens to each other, or within each of them (over heads)."""
    if any(flow.dims[-2] or flow.dims[-1] or flow.summed for flow in call.flows()):
        raise call.mixes("goes over several of them")
    raise NoRule(f"it uses {call.name}, which cannot be traced")


def drawn(call: Call) -> list[Flow]:
    """Random numbers other than dropout's: refused."""
    raise NotPerToken(f"it draws random numbers outside dropout ({call.name})")


TokenRule = Callable[[Call], list[Flow]]
TOKEN_RULES: Mapping[str, TokenRule] = {
    name: rule
    for rule, names in (
        (same, "clone _to_copy detach alias contiguous"),
        (literal, "lift_fresh lift_fresh_copy"),
        (reshaped, "view _unsafe_view reshape _reshape_copy _reshape_alias unsqueeze squeeze view_copy"),
        (permuted, "t transpose permute"),
        (expanded, "expand"),
        (cut, "slice select split split_with_sizes unbind"),
        (placed, "cat stack slice_backward select_backward constant_pad_nd"),
        (along, "sum mean amax amin max min var var_mean std std_mean logsumexp linalg_vector_norm norm prod any all "
                "argmax argmin topk sort cumsum cumprod _softmax _log_softmax _softmax_backward_data "
                "_log_softmax_backward_data glu glu_backward flip roll median kthvalue mode aminmax nansum "
                "count_nonzero cummax cummin logcumsumexp native_layer_norm "
                "native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward"),
        (put, "index_put _unsafe_index_put"),
        (along, ALL_TRUE),
        (looked_up, "index embedding gather scatter scatter_add"),
        (product, " ".join(_FACTORS)),
        (weight_normed, "_weight_norm_interface _weight_norm_interface_backward"),
        (convolved, "convolution convolution_backward"),
        (made, "zeros ones full empty new_zeros new_ones new_full new_empty zeros_like ones_like full_like empty_like "
               "scalar_tensor empty_strided new_empty_strided fill_ zero_"),
        (counted_up, "arange linspace eye tril_indices triu_indices randperm"),
        (dropped, "native_dropout bernoulli_ bernoulli"),
        (copied, "copy_"),
        (refusing("decides by their values"), "_local_scalar_dense is_nonzero equal nonzero masked_select _unique2 "
                                              "bincount unique_dim histc masked_scatter"),
        (refusing("goes over several of them"), "scatter_reduce index_add as_strided unfold diagonal "
            "tril triu native_batch_norm "
            "_native_batch_norm_legit _native_batch_norm_legit_no_training native_group_norm"),
        (attended, "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu "
                   "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention"),
    )
    for name in names.split()
}  # fmt: skip

_POINTWISE = frozenset(
    "mish_backward elu_backward celu_backward softplus_backward log_sigmoid_forward log_sigmoid_backward _conj "
    "_neg_view hardswish hardswish_backward hardsigmoid_backward leaky_relu_backward softshrink_backward "
    "hardshrink_backward floor_divide "
    "hardtanh_backward logit_backward rrelu_with_noise_backward _prelu_kernel _prelu_kernel_backward".split()
)
"""Operators that are pointwise and not tagged so."""


def rule_for(func: Any, name: str) -> TokenRule | None:
    """The rule of an operator, or of the one whose result it writes in place, or None."""
    if name in TOKEN_RULES:
        return TOKEN_RULES[name]
    plain = getattr(torch.ops.aten, name.rstrip("_"), None)
    tags = {tag for overload in (plain.overloads() if plain else ()) for tag in getattr(plain, overload).tags} | set(
        func.tags
    )
    if torch.Tag.nondeterministic_seeded in tags:
        return drawn
    return pointwise if torch.Tag.pointwise in tags or name in _POINTWISE else TOKEN_RULES.get(name.rstrip("_"))
