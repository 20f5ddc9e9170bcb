"""Liger's CuTe-DSL losses: the installed wheel's own functions, on the CPU.

Their Python runs as it is: checks of shapes, padding, autograd, scaling. Only what needs a GPU is replaced, each kernel
by the same in plain PyTorch.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import seqtile
from numerics._errors import assert_as_good
from numerics._heads import TILED, inputs, run, twin
from seqtile.ops.lm_loss import loss_kernels
from seqtile.ops.lm_loss.logits_tile import LogitScaling
from zoo import causal_lm

LIGER = find_spec("liger_kernel")
FOLDER = Path(LIGER.origin).parent / "ops" / "cutedsl" / "ops" if LIGER is not None and LIGER.origin else None
if FOLDER is None or not (FOLDER / "fused_linear_cross_entropy_sm90.py").exists():
    pytest.skip("needs liger-kernel 0.8.5 or newer", allow_module_level=True)

PACKAGE = "liger_kernel.ops.cutedsl.ops"
CAPABILITIES = {"Liger's SM90 kernel": (9, 0), "Liger's SM100 kernel": (10, 0)}
SHAPE = {"tokens": 1250, "hidden": 512, "vocabulary": 512}  # a fifth is ignored: 1,000 tokens, 2 % from 1,024


def constants(file: str) -> dict[str, Any]:
    """The constants of a module that cannot be imported."""
    assert FOLDER is not None
    nodes = [node for node in ast.parse((FOLDER / file).read_text(encoding="utf-8")).body if type(node) is ast.Assign]
    return {
        node.targets[0].id: node.value.value
        for node in nodes
        if isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Constant)
    }


def gemm(a: Tensor, b: Tensor, c: Tensor, output_scale: Tensor | None = None, **layouts: Any) -> None:
    product = a.float() @ b.float().t()
    c.copy_(product if output_scale is None else product * output_scale)


def loss_and_gradient(logits: Tensor, target: Tensor, nll: Tensor, scale: float, ignore_index: int, *_: Any) -> None:
    z, counts = logits.float(), target != ignore_index
    ids = target.where(counts, 0)
    nll.copy_(F.cross_entropy(z, ids, reduction="none") * counts)
    logits.copy_((z.softmax(-1) - F.one_hot(ids, z.shape[1])) * (scale * counts).unsqueeze(-1))


def module(monkeypatch: pytest.MonkeyPatch, name: str, **attributes: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(attributes)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both functions, importable; returns a function that sets the capability of the device."""
    for name in (loss_kernels.SM90, loss_kernels.SM100, f"{PACKAGE}._fused_linear_cross_entropy_backward_sm90"):
        monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setitem(sys.modules, name, None)  # so that what is imported now is forgotten afterwards
        del sys.modules[name]
    import_module("liger_kernel.ops.cutedsl")
    module(monkeypatch, PACKAGE, __path__=[str(FOLDER)])
    driver = module(monkeypatch, "cuda.bindings.driver", CUstream=int)
    module(monkeypatch, "cuda", bindings=module(monkeypatch, "cuda.bindings", driver=driver))
    cute = module(monkeypatch, "cutlass.cute", jit=lambda function: function)
    module(monkeypatch, "cutlass", cute=cute)
    module(monkeypatch, f"{PACKAGE}.utils", ensure_cuda_context=lambda: None)
    forward = "_fused_linear_cross_entropy_forward_sm90"
    module(
        monkeypatch, f"{PACKAGE}.{forward}", **constants(f"{forward}.py"), tile_gemm=gemm,
        cross_entropy_dz=loss_and_gradient,
    )  # fmt: skip
    module(
        monkeypatch, f"{PACKAGE}._sm100_gemm", K_ALIGNMENT=64,
        run_epilogue_gemm=lambda x, weight, out, epilogue: gemm(x, weight, out),
    )  # fmt: skip
    module(
        monkeypatch, f"{PACKAGE}.cross_entropy",
        _launch_ce_fwd=lambda logits, target, loss, scale, ignored, *_, **__: loss_and_gradient(
            logits, target, loss, scale, ignored
        ),
    )  # fmt: skip
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    sm100 = import_module(loss_kernels.SM100)
    monkeypatch.setattr(sm100, "_native_sm100_supported", lambda tensor: True)
    monkeypatch.setattr(sm100, "_SUPPORTS_OUT_DTYPE", False)
    monkeypatch.setattr(loss_kernels, "_trials", {})
    loss_kernels._why_no_import.cache_clear()

    def on(capability: tuple[int, int]) -> None:
        monkeypatch.setattr(loss_kernels, "compute_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    yield on
    loss_kernels._why_no_import.cache_clear()


def given(**changes: Any) -> dict[str, Tensor]:
    return inputs(**{**SHAPE, **changes}, dtype=torch.bfloat16, bias=False)


def chosen(**arguments: Any) -> loss_kernels.LossChoice:
    with loss_kernels.record_choices() as choices:
        TILED(**arguments)
    return choices[-1]


@pytest.mark.parametrize("impl", ["auto", "liger"])
@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"num_items": 77}], ids=str)
@pytest.mark.parametrize("name", CAPABILITIES)
def test_as_exact_as_untiled(kernels: Callable[..., None], name: str, settings: dict[str, Any], impl: str) -> None:
    kernels(CAPABILITIES[name])
    arguments = given()
    true = {key: value.detach() for key, value in arguments.items()}
    true |= {key: true[key].double().requires_grad_() for key in ("hidden", "weight")}
    upstream = torch.tensor(0.375)
    truth = run(twin, true, upstream.double(), **settings)
    assert chosen(**arguments, impl=impl, **settings).name == name
    assert_as_good(
        run(TILED, arguments, upstream, impl=impl, **settings), run(twin, arguments, upstream, **settings), truth
    )


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_backward_twice(kernels: Callable[..., None], name: str) -> None:
    kernels(CAPABILITIES[name])
    arguments = given()
    loss = TILED(**arguments, impl="liger")
    wanted = [arguments["hidden"], arguments["weight"]]
    first = [grad.clone() for grad in torch.autograd.grad(loss, wanted, retain_graph=True)]
    torch.testing.assert_close(torch.autograd.grad(loss, wanted), tuple(first))


@pytest.mark.parametrize("name", CAPABILITIES)
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"bias": torch.zeros(512, dtype=torch.bfloat16)}, "support bias"),
        ({"label_smoothing": 0.1}, "support bias"),
        ({"z_loss": 0.1}, "support bias"),
        ({"scaling": LogitScaling(softcap=2.0)}, "support bias"),
        ({"scaling": LogitScaling(scale=0.25)}, "scale logits"),
        ({"class_weights": torch.ones(512)}, "class weights"),
        ({"token_weights": torch.ones(1250)}, "a sum only"),
        ({"reduction": "none"}, "a sum only"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_what_it_does_not_compute(
    kernels: Callable[..., None], name: str, settings: dict[str, Any], reason: str
) -> None:
    kernels(CAPABILITIES[name])
    choice = chosen(**given(), impl="auto", **settings)
    assert choice.name == "torch" and reason in choice.reasons[name]


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("Liger's SM90 kernel", {"tokens": 2500, "hidden": 256}, "saves all 2,000 x 512 logits"),
        ("Liger's SM90 kernel", {"vocabulary": 500}, "256 divides"),
        ("Liger's SM90 kernel", {"tokens": 900}, "within 5 %"),
        ("Liger's SM90 kernel", {"dtype": torch.float16}, "float16"),
        ("Liger's SM100 kernel", {"dtype": torch.float16}, "float16"),
        ("Liger's SM100 kernel", {"dtype": torch.float32}, "float32"),
    ],
)  # fmt: skip
def test_shapes_and_dtypes(kernels: Callable[..., None], name: str, changes: dict[str, Any], reason: str) -> None:
    kernels(CAPABILITIES[name])
    arguments = inputs(**{"dtype": torch.bfloat16, **SHAPE, **changes}, bias=False)
    assert reason in chosen(**arguments, impl="auto").reasons[name]


@pytest.mark.parametrize("name", CAPABILITIES)
def test_a_frozen_head_or_no_gradient(kernels: Callable[..., None], name: str) -> None:
    kernels(CAPABILITIES[name])
    arguments = given()
    with torch.no_grad():
        assert "frozen" in chosen(**arguments, impl="auto").reasons[name]
    arguments["weight"].requires_grad_(False)
    assert "frozen" in chosen(**arguments, impl="auto").reasons[name]


@pytest.mark.parametrize("capability", [(8, 0), (9, 1), (10, 3), (12, 0)])
def test_other_devices(kernels: Callable[..., None], capability: tuple[int, int]) -> None:
    kernels(capability)
    choice = chosen(**given(), impl="auto")
    assert choice.name == "torch" and choice.reasons.keys() == CAPABILITIES.keys()
    assert all("needs compute capability" in reason for reason in choice.reasons.values())


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    """This environment has Liger without CuTe DSL: the device is right, the import is not."""
    if find_spec("cutlass") is not None:
        pytest.skip("CuTe DSL is installed")
    monkeypatch.setattr(loss_kernels, "compute_capability", lambda device: (9, 0))
    loss_kernels._why_no_import.cache_clear()
    choice = chosen(**given(), impl="auto")
    assert choice.name == "torch" and "cutedsl" in choice.reasons["Liger's SM90 kernel"]


def test_an_import_that_fails_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_driver(name: str) -> None:
        raise OSError("libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(loss_kernels, "compute_capability", lambda device: (10, 0))
    monkeypatch.setattr(loss_kernels, "import_module", no_driver)
    loss_kernels._why_no_import.cache_clear()
    choice = chosen(**given(), impl="auto")
    loss_kernels._why_no_import.cache_clear()
    assert choice.name == "torch" and "libcuda" in choice.reasons["Liger's SM100 kernel"]


@pytest.mark.parametrize("name", CAPABILITIES)
@pytest.mark.parametrize("fault", ["raises", "scale", "one token"])
def test_a_kernel_that_fails_its_trial(
    kernels: Callable[..., None], monkeypatch: pytest.MonkeyPatch, name: str, fault: str
) -> None:
    """Ours computes the loss, and the trial is not made again."""
    kernels(CAPABILITIES[name])
    file = f"{PACKAGE}._fused_linear_cross_entropy_forward_sm90" if "SM90" in name else f"{PACKAGE}.cross_entropy"
    attribute = "cross_entropy_dz" if "SM90" in name else "_launch_ce_fwd"
    trials = []

    def broken(logits: Tensor, target: Tensor, nll: Tensor, scale: float, ignored: int, *_: Any, **__: Any) -> None:
        trials.append(fault)
        if fault == "raises":
            raise RuntimeError("no kernel image is available")
        loss_and_gradient(logits, target, nll, scale, ignored)
        if fault == "scale":
            logits.mul_(1.05)
        else:
            logits[0] = 0

    monkeypatch.setattr(sys.modules[file], attribute, broken)
    target = loss_kernels.SM90 if "SM90" in name else loss_kernels.SM100
    monkeypatch.setattr(import_module(target), attribute, broken)
    arguments = given()
    for _ in range(2):
        choice = chosen(**arguments, impl="auto")
        assert choice.name == "torch" and "in a trial" in choice.reasons[name]
    assert len(trials) == 1
    torch.testing.assert_close(TILED(**arguments, impl="auto"), TILED(**arguments))


def test_the_report(kernels: Callable[..., None]) -> None:
    kernels((9, 0))
    model = causal_lm("llama", vocab_size=256, hidden_size=512, dtype=torch.bfloat16)
    report = seqtile.apply(model, blocks="none", loss="tiled", loss_impl="auto")
    ids = torch.randint(256, (1, 1025))
    model(input_ids=ids, labels=ids).loss.backward()
    [note] = [note for note in report.notes if "loss_impl" in note]
    assert "Liger's SM90 kernel computes the loss; not Liger's SM100 kernel: it needs" in note


def signature(file: str, function: str) -> list[str]:
    """Arguments of a function, or a method as ``Class.method``, of a module that cannot be imported."""
    assert FOLDER is not None
    nodes: Any = ast.parse((FOLDER / file).read_text(encoding="utf-8")).body
    for part in function.split("."):
        [node] = [node for node in nodes if getattr(node, "name", None) == part]
        nodes = getattr(node, "body", [])
    return [argument.arg for argument in node.args.args]


def test_signatures_of_the_installed_wheel() -> None:
    assert signature("fused_linear_cross_entropy_sm90.py", "liger_fused_linear_cross_entropy_sm90") == [
        "_input", "weight", "target", "ignore_index", "reduction",
    ]  # fmt: skip
    names = signature("fused_linear_cross_entropy.py", "LigerFusedLinearCrossEntropyFunction.forward")
    assert names[:13] == [
        "ctx", "_input", "weight", "target", "bias", "ce_weight", "ignore_index", "lse_square_scale",
        "label_smoothing", "reduction", "softcap", "return_z_loss", "accum_dtype",
    ]  # fmt: skip
    tiles = constants("_fused_linear_cross_entropy_forward_sm90.py")
    assert loss_kernels.SM90_ROWS % tiles["TILE_M"] == 0 and loss_kernels.SM90_COLUMNS == tiles["TILE_N"]
