"""What `_compat` relies on inside torch, and would not be noticed missing: names whose absence raises need no test."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

from seqtile import _compat
from seqtile._shallow import view_of
from seqtile.ops.attention.piece_kernels import CuDnn, Flash, Piece, Plain


def no_hook(*_: Any) -> None:
    return None


def test_no_name_is_missing() -> None:
    missing = [name for name, value in vars(_compat).items() if isinstance(value, _compat.Moved)]
    assert missing == []


@pytest.mark.parametrize(
    ("module", "where", "name", "value"),
    [
        (nn.Sequential(nn.Linear(2, 2)), _compat.MODULES, "0", nn.Identity()),
        (nn.Linear(2, 2), _compat.PARAMETERS, "weight", torch.ones(2, 2)),
        (nn.BatchNorm1d(2), _compat.BUFFERS, "running_mean", torch.ones(2)),
    ],
    ids=["child", "parameter", "buffer"],
)
def test_a_shallow_copy_with_something_replaced(module: nn.Module, where: str, name: str, value: Any) -> None:
    copy = view_of(module)
    copy.__dict__[where] = {**copy.__dict__[where], name: value}
    assert getattr(copy, name) is value and getattr(module, name) is not value
    assert _compat.children_of(module) == dict(module.named_children())
    assert _compat.parameters_of(module) == dict(module.named_parameters(recurse=False))
    assert _compat.buffers_of(module) == dict(module.named_buffers(recurse=False))


def test_hooks_of_a_module() -> None:
    module = nn.Identity()
    registers: tuple[Callable[..., Any], ...] = (
        module.register_forward_hook, module.register_forward_pre_hook,
        module.register_full_backward_hook, module.register_full_backward_pre_hook,
    )  # fmt: skip
    for register, name in zip(registers, _compat.HOOKS, strict=True):
        assert len(getattr(module, name)) == 0
        register(no_hook)
        assert list(getattr(module, name).values()) == [no_hook]
    assert list(_compat.forward_pre_hooks_of(module).values()) == [no_hook]


def test_the_frame_that_calls_a_forward_has_the_module() -> None:
    class Caller(nn.Module):
        def forward(self) -> bool:
            frame = sys._getframe(1)
            return frame.f_code is _compat.CALL_CODE and frame.f_locals.get("self") is self

    assert Caller()()


def test_data_parallel_replicates_by_the_method() -> None:
    assert f".{_compat.REPLICATE}()" in inspect.getsource(torch.nn.parallel.replicate)


def test_versions_views_and_storages() -> None:
    tensor, stranger = torch.zeros(2), torch.zeros(2)
    before = _compat.version_of(tensor)
    tensor[:1].add_(1)
    assert _compat.version_of(tensor) == before + 1
    assert _compat.base_of(tensor) is None and _compat.base_of(tensor[:1]) is tensor
    keys = [_compat.storage_key(one.untyped_storage()) for one in (tensor, tensor[1:], stranger)]
    assert keys[0] == keys[1] != keys[2]
    tensor.requires_grad_()
    assert _compat.is_view(tensor[:1]) and not _compat.is_view(tensor) and not _compat.is_view(tensor + 1)


def test_sums_of_gradients_that_autograd_does_in_place() -> None:
    in_place: list[bool] = []

    class Mode(_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled():
                in_place.append(_compat.sums_gradients_in_place(args[0]))
            return func(*args, **(kwargs or {}))

    class Plus(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad.exp() + grad

    with Mode():
        x = torch.ones(2, requires_grad=True) * 1
        (x.exp() + x.sin()).exp().sum().backward()
        x, y = (torch.ones(2, requires_grad=True) * 1 for _ in range(2))
        low = x.sin() * y.sin()
        ((x + y).exp() + low).exp().sum().backward()  # x and y begin with the same gradient
        Plus.apply(torch.ones(2, requires_grad=True)).exp().sum().backward()
    assert in_place == [True, False, True, False]


def test_marks_on_weights() -> None:
    weight = nn.Parameter(torch.zeros(2))
    assert not _compat.has_gradient_step(weight)
    weight.register_post_accumulate_grad_hook(no_hook)
    assert _compat.has_gradient_step(weight)
    alias = torch.zeros(2)
    _compat.call_parameter(alias)
    assert isinstance(alias, nn.Parameter)
    flat = torch.distributed.fsdp._flat_param.FlatParameter(torch.zeros(4))
    assert _compat.is_flat_parameter(flat) and _compat.is_flat_parameter(_compat.base_of(flat[:2]))
    assert not _compat.is_flat_parameter(nn.Parameter(torch.zeros(4)))


def test_what_is_active() -> None:
    assert _compat.transform_level() is None and not _compat.in_forward_mode()
    inside = torch.func.vmap(lambda x: x + (_compat.transform_level() is not None))(torch.zeros(2))
    assert inside.sum() == 2
    with torch.autograd.forward_ad.dual_level():
        assert _compat.in_forward_mode()
    before = _compat.active_fake_mode()
    with _compat.FakeTensorMode() as mode:
        assert _compat.active_fake_mode() is mode and _compat.dispatch_modes()[-1] is mode
        with _compat.disable_current_modes():
            assert type(torch.ones(1)) is Tensor
    assert _compat.active_fake_mode() is before


def test_names_that_checkpoints_ask_for() -> None:
    for name in _compat.METADATA_NAMES:
        if name.startswith("torch"):
            assert not isinstance(_compat._find(":".join(name.rsplit(".", 1))), _compat.Moved)


def test_a_number_that_is_read_of_a_fake_tensor_is_named() -> None:
    with _compat.FakeTensorMode(), pytest.raises(_compat.DataDependentOutputException) as refused:
        bool((torch.ones(3, 2) @ torch.ones(2, 4)).sum() > 0)
    assert refused.value.func is _compat.READ_NUMBER
    assert _compat.schema_of(_compat.READ_NUMBER).name == f"aten::{_compat.READ_NUMBER_NAME}"


def test_an_unsafe_view_is_no_view() -> None:
    x = torch.ones(6, requires_grad=True) * 2
    viewed = _compat.unsafe_view(x, (2, 3))
    assert viewed.shape == (2, 3) and not _compat.is_view(viewed) and viewed.data_ptr() == x.data_ptr()


def test_attention_runs_one_of_the_kernels_in_the_order_that_is_set() -> None:
    assert [name for name in _compat.ATTENTION_KERNELS if not hasattr(torch.ops.aten, name)] == []
    operators = []

    class Mode(_compat.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(_compat.schema_of(func).name.removeprefix("aten::"))
            return func(*args, **(kwargs or {}))

    x = torch.ones(1, 1, 4, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), Mode():
        nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
    assert set(operators) & set(_compat.ATTENTION_KERNELS)
    for order in ([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        with sdpa_kernel(order, set_priority=True):
            assert _compat.allowed_sdpa_kernels(with_priority=True) == order


def test_each_backward_has_a_number_and_says_whether_it_keeps_the_graph() -> None:
    passes: list[tuple[int, bool]] = []
    y = torch.ones(1, requires_grad=True) * 1
    y.register_hook(lambda _: passes.append((_compat.backward_pass(), _compat.keeps_graph())))
    y.backward(retain_graph=True)
    y.backward()
    assert _compat.backward_pass() == -1
    assert [keeps for _, keeps in passes] == [True, False]
    assert len({number for number, _ in passes} | {-1}) == 3


def test_the_early_stop_of_checkpoints() -> None:
    before = _compat.early_stop()
    with checkpoint.set_checkpoint_early_stop(False):
        assert _compat.early_stop() is False
    assert _compat.early_stop() is before


def test_what_a_selective_checkpoint_keeps_can_be_taken_and_put_back() -> None:
    x = torch.ones(2, 2, requires_grad=True)
    save = checkpoint.CheckpointPolicy.MUST_SAVE
    forward, recompute = checkpoint.create_selective_checkpoint_contexts(lambda *_, **__: save)
    with forward:
        tripled = (x * 3).detach()
    [kept] = [value for value in _compat.saved_values(forward) if isinstance(value.get(), Tensor)]
    assert torch.equal(kept.get(), tripled)
    replacement = tripled + 1
    kept.drop()
    kept.put(replacement)
    with recompute:
        recomputed = (x * 3).detach()
    assert torch.equal(recomputed, replacement)


def test_a_selective_checkpoint_saves_past_hooks_inside_it() -> None:
    x = torch.ones(2, requires_grad=True)
    save = checkpoint.CheckpointPolicy.MUST_SAVE
    forward, recompute = checkpoint.create_selective_checkpoint_contexts(lambda *_, **__: save)
    vars(forward).update(_compat.HOOKS_SEE_WHAT_IS_KEPT)
    with forward, _compat.hooks_inside_checkpoints(lambda _: None, lambda _: torch.empty(0)):
        tripled = (x * 3).detach()
    with recompute:
        recomputed = (x * 3).detach()
    assert torch.equal(recomputed, tripled)


@pytest.mark.parametrize("kernel", [Flash, CuDnn])
def test_fused_kernels_of_accelerators_take_a_piece_of_keys(kernel: type[Plain]) -> None:
    """By PyTorch's shape functions, which check arguments without a GPU: more keys than queries, grouped."""
    q, k, v = (torch.empty(2, heads, tokens, 16, dtype=torch.bfloat16, device="meta")
               for heads, tokens in ((4, 64), (2, 192), (2, 192)))  # fmt: skip
    piece = Piece(scale=0.3, causal=False)
    output, lse = kernel.forward(q, k, v, piece)
    assert (output.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)
    gradients = kernel.backward(output, q, k, v, output, lse, piece)
    assert [gradient.shape for gradient in gradients] == [q.shape, k.shape, v.shape]


def test_a_name_that_is_gone_raises_at_its_first_use() -> None:
    gone = _compat._find("torch.nothing_of_that_name")
    for use in (lambda: gone(1), lambda: gone.default, lambda: isinstance(1, gone), lambda: list(gone)):
        with pytest.raises(_compat.MovedError, match="nothing_of_that_name, which torch .*seqtile doctor --compat"):
            use()
