"""Third-party kernels: chosen only where they mean the same, told what they need to, refused with a reason.

No kernel runs here: each needs Triton and a GPU. Stand-ins with their signatures compute by plain PyTorch what they are
told to, and say that they were asked.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import seqtile
from numerics._errors import assert_as_good
from numerics._heads import IGNORE, SCALINGS, TILED, assert_same, inputs, run, twin
from refusals import refused
from seqtile.ops.lm_loss import loss_kernels
from seqtile.ops.lm_loss.logits_tile import LogitScaling
from seqtile.options import LOSS_KERNELS
from zoo import causal_lm, tokens

ASKED: list[str] = []


def liger(
    input: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, ce_weight: None = None,
    ignore_index: int = -100, lse_square_scale: float = 0.0, label_smoothing: float = 0.0, reduction: str = "mean",
    softcap: float | None = None, return_z_loss: bool = False, accum_dtype: torch.dtype | None = None,
) -> Tensor:  # fmt: skip
    ASKED.append("liger")
    assert reduction == "sum" and accum_dtype == torch.float32
    return twin(
        input, weight, target, bias=bias, ignore_index=ignore_index, z_loss=lse_square_scale,
        label_smoothing=label_smoothing, scaling=LogitScaling(softcap=softcap), reduction="sum",
    )  # fmt: skip


def cce(
    e: Tensor, c: Tensor, targets: Tensor, ignore_index: int = -100, softcap: float | None = None,
    reduction: str = "mean", shift: bool = False, filter_eps: float | str | None = "high", accum_e_fp32: bool = False,
    accum_c_fp32: bool = False,
) -> Tensor:  # fmt: skip
    ASKED.append("cce")
    assert filter_eps is None and accum_e_fp32 and accum_c_fp32 and reduction == "sum"
    return twin(e, c, targets, ignore_index=ignore_index, scaling=LogitScaling(softcap=softcap), reduction="sum")


def quack(
    x: Tensor, weight: Tensor, target: Tensor, chunk_size: int = 4096, ignore_index: int = -100,
    reduction: str = "mean", tile_n1: int | None = None,
) -> Tensor:  # fmt: skip
    """The arguments of quack-kernels 0.6.5."""
    ASKED.append("quack")
    assert reduction == "sum" and chunk_size % 128 == 0 and weight.shape[0] % 128 == 0
    return twin(x, weight, target, ignore_index=ignore_index, reduction="sum")


def coarse_cce(e: Tensor, c: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    raise AssertionError("a version that sums in low precision was used")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend that both packages and a device for them are there."""
    ASKED.clear()
    functional, cut = ModuleType("liger_kernel.transformers.functional"), ModuleType("cut_cross_entropy")
    ducks = ModuleType(loss_kernels.QUACK)
    ducks.scaled_exp_linear_cross_entropy = quack  # type: ignore[attr-defined]
    functional.liger_fused_linear_cross_entropy = liger  # type: ignore[attr-defined]
    cut.linear_cross_entropy = cce  # type: ignore[attr-defined]
    for name in ("liger_kernel", "liger_kernel.transformers", "quack"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, ducks.__name__, ducks)
    monkeypatch.setitem(sys.modules, functional.__name__, functional)
    monkeypatch.setitem(sys.modules, cut.__name__, cut)
    monkeypatch.setattr(loss_kernels, "find_spec", lambda name: name)
    monkeypatch.setattr(loss_kernels, "_has_triton", lambda device: True)
    monkeypatch.setattr(loss_kernels, "_trials", {})
    loss_kernels._why_no_import.cache_clear()
    return cut


@pytest.mark.parametrize("name", ["liger", "cce", "quack", "auto"])
def test_nothing_is_installed_here(name: str) -> None:
    given = inputs()
    if name == "auto":
        assert_same(run(TILED, given, impl="auto", tile=10), run(TILED, given, tile=10))
        return
    with pytest.raises(ValueError, match=r"is not installed|needs Triton and a GPU"):
        TILED(**given, impl=name)


@pytest.mark.parametrize("name", [name for name in LOSS_KERNELS if name not in ("torch", "auto")])
def test_a_kernel_that_is_missing_is_refused_before_the_first_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernels, "find_spec", lambda _: None)
    monkeypatch.delattr(torch.nn, "LinearCrossEntropyOptions", raising=False)
    model = causal_lm("llama")
    with refused("loss-impl.missing", f"loss_impl='{name}'"):
        seqtile.apply(model, loss="tiled", loss_impl=name)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"reduction": "sum"},
        {"num_items": 77},
        {"num_items": torch.tensor(77)},
        {"label_smoothing": 0.1, "z_loss": 0.01},
        {"scaling": LogitScaling(softcap=2.0)},
        {"ignore_index": 7},
    ],
    ids=str,
)
def test_liger_is_told_everything(settings: dict[str, Any]) -> None:
    given = inputs()
    given["labels"][given["labels"] == IGNORE] = settings.get("ignore_index", IGNORE)
    assert_same(run(TILED, given, impl="liger", **settings), run(twin, given, **settings))
    assert ASKED == ["liger"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("settings", [{}, {"num_items": 77}, {"scaling": LogitScaling(softcap=2.0)}], ids=str)
def test_cce_is_told_everything(settings: dict[str, Any]) -> None:
    given = inputs(dtype=torch.bfloat16, bias=False)
    assert_same(run(TILED, given, impl="cce", **settings), run(twin, given, **settings))
    assert ASKED == ["cce"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
def test_quack_is_told_everything(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_kernels, "compute_capability", lambda device: (9, 0))
    given = inputs(dtype=torch.bfloat16, bias=False, vocabulary=256)
    given["weight"].requires_grad_(not frozen)
    assert_same(run(TILED, given, impl="quack"), run(twin, given))
    assert ASKED == ["quack"] * 2, "in a trial before the call"
    ASKED.clear()
    TILED(**given, impl="auto")
    assert not ASKED, "its backward runs once only"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("impl", "settings", "words"),
    [
        ("liger", {"reduction": "none"}, "returns a sum only"),
        ("liger", {"token_weights": torch.ones(37)}, "returns a sum only"),
        ("liger", {"scaling": SCALINGS["scaled"]}, "does not scale"),
        ("liger", {"dtype": torch.float64}, "computes in fp32"),
        ("cce", {}, "bias"),
        ("cce", {"z_loss": 0.1}, "z-loss"),
        ("cce", {"bias": None}, "bf16 and fp16"),
        ("quack", {"bias": None}, "compute capability 9.0"),
    ],
)
def test_refused_by_name_and_passed_over_by_auto(impl: str, settings: dict[str, Any], words: str) -> None:
    given = {**inputs(dtype=settings.pop("dtype", torch.float32)), **settings}
    with pytest.raises(ValueError, match=words):
        TILED(**given, impl=impl)
    ASKED.clear()
    torch.testing.assert_close(TILED(**given, impl="auto"), TILED(**given))
    assert impl not in ASKED


def test_a_version_that_sums_in_low_precision(installed: Any) -> None:
    given = inputs(dtype=torch.bfloat16, bias=False)
    installed.linear_cross_entropy = coarse_cce
    with pytest.raises(ValueError, match="low precision"):
        TILED(**given, impl="cce")


@pytest.mark.usefixtures("installed")
def test_auto_takes_none_that_is_slower_than_ours() -> None:
    TILED(**inputs(dtype=torch.bfloat16, bias=False), impl="auto")
    assert not ASKED


@pytest.mark.usefixtures("installed")
def test_a_mean_over_nothing() -> None:
    given = inputs()
    given["labels"].fill_(IGNORE)
    ours = run(TILED, given, impl="liger")
    assert ours.pop("loss").isnan() and all((value == 0).all() for value in ours.values())


@pytest.mark.usefixtures("installed")
def test_on_a_model() -> None:
    model, ids = causal_lm("llama"), tokens()
    expected = model(input_ids=ids, labels=ids).loss
    report = seqtile.apply(model, blocks="none", loss="tiled", loss_impl="liger")
    torch.testing.assert_close(model(input_ids=ids, labels=ids).loss, expected)
    assert ASKED == ["liger"]
    [note] = [note for note in report.notes if "loss_impl" in note]
    assert "Liger's Triton kernel computes the loss" in note and "not Liger's SM90 kernel: it needs" in note


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings(
    "ignore:Model has `tie_word_embeddings=True`:UserWarning"
)  # PEFT 0.19, of an untied head too
def test_a_head_that_is_more_than_its_weight() -> None:
    """By name refused, also where the adapter comes after seqtile.apply; "auto" runs the module in plain PyTorch."""
    from peft import LoraConfig, get_peft_model

    model, ids = causal_lm("llama", tie_word_embeddings=False), tokens()
    seqtile.apply(model, blocks="none", loss="tiled", loss_impl="liger")
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["lm_head"]))
    for call in (
        lambda: model(input_ids=ids, labels=ids),
        lambda: seqtile.apply(model, blocks="none", loss="tiled", loss_impl="cce"),
    ):
        with refused("loss-impl.head-not-plain", "peft.tuners"):
            call()
    assert not ASKED
    seqtile.apply(model, blocks="none", loss="tiled", loss_impl="auto")
    assert model(input_ids=ids, labels=ids).logits is None and not ASKED


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="expected one of 'torch', 'native'"):
        TILED(**inputs(), impl="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["liger", "cce", "quack"])
def test_the_kernel_itself(impl: str) -> None:
    package = {"liger": "liger_kernel", "cce": "cut_cross_entropy", "quack": "quack"}[impl]
    if not torch.accelerator.is_available() or importlib.util.find_spec(package) is None:
        pytest.skip(f"needs an accelerator and {package}")
    device = torch.accelerator.current_accelerator()
    given = {  # a size that Liger's SM90 kernel takes
        name: tensor.detach().to(device).requires_grad_(tensor.is_floating_point())
        for name, tensor in inputs(
            1280, 512, 512, dtype=torch.bfloat16, bias=False
        ).items()  # what Liger's SM90 kernel takes
    }
    true = {
        name: tensor.detach().float().requires_grad_() if tensor.is_floating_point() else tensor
        for name, tensor in given.items()
    }
    upstream = torch.tensor(0.375, device=device)
    truth, plain = run(twin, true, upstream), run(twin, given, upstream)
    try:
        tiled = run(TILED, given, upstream, impl=impl)
    except ValueError as error:
        if "this version" in str(error):
            pytest.skip(str(error))
        raise
    assert_as_good(tiled, plain, truth)
