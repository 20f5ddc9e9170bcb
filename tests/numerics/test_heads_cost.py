"""What head-wise attention costs: matrix products, attention calls, and bytes alive in a layer's backward."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import seqtile
from seqtile.options import WHOLE_LAYER, TilingOptions
from seqtile.planner.fake_step import fake_step
from seqtile.planner.step_config import Lora, Setup
from zoo import HIDDEN, causal_lm, tokens

BATCH, LENGTH, LAYERS, QUERY, GROUPS = 2, 24, 2, 8, 4
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "attention_rows.py"


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("attention_rows", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = _script()


class _Heads(TorchDispatchMode):
    """Query heads that attention kernels have run on, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.backward = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "_scaled_dot_product" in func.name():
            if "backward" in func.name():
                self.backward += args[1].shape[1]
            else:
                self.forward += args[0].shape[1]
        return func(*args, **(kwargs or {}))


def _cost(how: str, adapters: bool = False, frozen: bool = False, **settings: Any) -> tuple[float, int, int]:
    """Floating-point operations of all products, and heads that kernels ran on, of one step."""
    config = dict(num_attention_heads=QUERY, num_key_value_heads=GROUPS, head_dim=4, attention_bias=True)
    model: nn.Module = causal_lm("llama", use_cache=False, attn_implementation="sdpa", **config)
    if how != "none":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": how == "reentrant"})
        model.enable_input_require_grads()
    if adapters:
        model = get_peft_model(model, LoraConfig(r=3, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    if frozen:
        for name, weight in model.named_parameters():
            weight.requires_grad_("self_attn" not in name)
    more = {"checkpoint": "attention-saved"} if how == "attention-saved" else {}
    if settings or more:
        seqtile.apply(model, blocks="none", **settings, **more)
    ids = tokens(BATCH, LENGTH)
    with _Heads() as heads, seqtile.count_products() as products:
        model(input_ids=ids, labels=ids).loss.backward()
    return products.flops, heads.forward, heads.backward


@pytest.mark.parametrize("how", ["none", "checkpoint", "reentrant", "attention-saved"])
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_products_and_attention_calls_of_the_untiled_layer(how: str, frozen: bool) -> None:
    untiled = _cost(how, frozen=frozen)
    once = LAYERS * QUERY
    assert untiled[1:] == ((2 if how in ("checkpoint", "reentrant") else 1) * once, once)
    for per_pass in (1, 3, GROUPS):
        assert _cost(how, frozen=frozen, heads=per_pass) == untiled


@pytest.mark.parametrize("how", ["none", "checkpoint", "attention-saved"])
def test_adapters_add_their_own_products_alone(how: str) -> None:
    """``x @ A`` once more for the gradient of ``B``, as in the fused MLP; it is rank / width of a product."""
    untiled, got = _cost(how, adapters=True), _cost(how, adapters=True, heads=1)
    again = 2 * LAYERS * BATCH * LENGTH * 3 * (3 * HIDDEN + QUERY * 4)
    assert untiled[0] <= got[0] <= untiled[0] + again and got[1:] == untiled[1:]


def test_nothing_is_kept_but_input_output_and_sums() -> None:
    """Between forward and backward of one layer, in rows of 256 bf16 numbers; the log-sum-exp is a quarter row here."""
    config = dict(hidden_size=256, head_dim=8, intermediate_size=896)
    sums, angles = 32 * 4 / (256 * 2), 8 / 256
    full = script.count_rows(1024, {"tile": 64, "heads": 1}, **config)
    saved = script.count_rows(1024, {"tile": 64, "heads": 1, "checkpoint": "attention-saved"}, **config)
    assert full.held == pytest.approx(1 + angles, abs=0.01)
    assert saved.held == pytest.approx(2 + sums + angles, abs=0.01)


COARSE = {"tile": "shards:32"}
"""Half the tiles of the table in docs/techniques.md: quicker to count, and their buffers take twice as much."""
SAVED = {"checkpoint": "attention-saved"}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [131072, 1048576])
def test_rows_of_llama_8b(tokens: int) -> None:
    """A layer's backward in hidden-state tensors: 14 with the MLP tiled, below 6 head-wise, kernels' own included."""
    saved = script.count_rows(tokens, COARSE | SAVED | {"heads": 1})
    assert saved.kernels < 6 and saved.held < 2.1
    if tokens == 131072:
        assert 14 <= script.count_rows(tokens, COARSE).kernels < 14.1
        assert script.count_rows(tokens, {}).kernels > 29
        full = script.count_rows(tokens, COARSE | {"heads": 1})  # queries, keys and values wait for the MLP's backward
        assert full.kernels < 6.5 + 1.2 and full.held < 1.1


def test_a_whole_step_on_fake_tensors() -> None:
    """Two layers with adapters: the peak above weights and what layers keep, final norm and head included."""
    from transformers import AutoConfig

    sizes = {"num_hidden_layers": 2, "hidden_size": 512, "head_dim": 16, "intermediate_size": 1792}
    config = AutoConfig.for_model("llama", **{**script.LLAMA_8B, **sizes})
    length, row = 4096, 4096 * 512 * 2
    peaks = []
    for heads in (None, 1):
        options = TilingOptions(
            tile="shards:32", loss="tiled", loss_tile=512, checkpoint="attention-saved", heads=heads,
            blocks="auto" if heads is None else WHOLE_LAYER,
        )  # fmt: skip
        setup = Setup(lora=Lora(4, ("q_proj", "v_proj")), attention="flash", options=options, optimizer="sgd")
        run = fake_step(config, setup, length)
        other = next(part for part in run.peaks.values() if part.total == run.peak).terms["weights"]
        peaks.append((run.peak - other) / row)
    kept = 1 + 1 + 32 * 4 / (2 * 512)  # of the other layer: input, attention's output and log-sum-exp
    assert peaks[0] - kept > 14 and peaks[1] - kept < 6.5, peaks
