"""Hybrid models family by family: what runs in tiles, and what tiles buy; the table of docs/techniques.md.

    python benchmarks/hybrid.py [--only FAMILY ...] [--grid] [--buys] [--write]

Each family of the installed transformers is built tiny, without a network. One training step with everything in tiles,
offloaded and with "attention-saved" checkpoints, all weights and adapters alone, is compared with the untiled model's
(``--grid``: each technique by itself too). The errors are printed beside each line of the table.

``--buys`` prints what tiled MLPs buy, by a fake step of 65,536 tokens at the default widths with the first and last
layer of each kind: the most that activations hold in the backward of one layer, untiled and tiled, both with activation
checkpoints.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from peft import get_peft_model

import seqtile
from environment import environment, stamp
from pages import write_between
from seqtile._errors import UserError
from seqtile.install.adapters import lora_config
from seqtile.options import TilingOptions
from seqtile.planner.fake_step import build_bare, fake_step
from seqtile.planner.layer_structure import LayerSample, find_depths
from seqtile.planner.live_at_peaks import CHECKPOINTS, GRADIENTS, OPTIMIZER, WEIGHTS
from seqtile.planner.step_config import Setup
from seqtile.recognise.decoder_layers import decoder_layers
from tiny_models import build, tiny_config

KINDS: dict[str, set[str]] = {
    "qwen3_next": {"Gated DeltaNet", "attention"},
    "qwen3_5_text": {"Gated DeltaNet", "attention"},
    "qwen3_5_moe_text": {"Gated DeltaNet", "attention"},
    "olmo_hybrid": {"Gated DeltaNet", "attention"},
    "kimi_linear": {"KDA", "attention"},
    "bailing_hybrid": {"KDA", "attention"},
    "bamba": {"Mamba-2", "attention"},
    "nemotron_h": {"Mamba-2", "attention", "MLP"},
    "falcon_h1": {"attention and Mamba-2"},
    "granitemoehybrid": {"Mamba-2", "attention"},
    "zamba2": {"Mamba-2", "attention and Mamba-2"},
    "jamba": {"Mamba", "attention"},
    "lfm2_moe": {"short convolution", "attention"},
    "minimax": {"lightning attention", "attention"},
    "recurrent_gemma": {"RG-LRU", "attention"},
}
"""The kinds of decoder layers of each family."""

WITHOUT_MLP = {"zamba2"}
"""Families whose MLPs take an adapter per layer, and stay untiled."""

SETTINGS: dict[str, dict[str, Any]] = {
    "MLP": {"tile": 5},
    "loss": {"tile": 5, "loss": "tiled", "loss_tile": 7},
    "offload": {"tile": 5, "offload": True},
    "attention saved": {"tile": 5, "checkpoint": "attention-saved"},
    "all": {"tile": 5, "loss": "tiled", "loss_tile": 7, "offload": True, "checkpoint": "attention-saved"},
}
TOKENS = 19
PLANNED = 65_536
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
FEW_EXPERTS = 16
PAGE = Path(__file__).parents[1] / "docs" / "techniques.md"
BEGIN, END = "<!-- families: written by benchmarks/hybrid.py -->", "<!-- families: end -->"


def settings_of(family: str, name: str) -> dict[str, Any]:
    """What ``seqtile.apply`` is told; empty where the family has nothing of it."""
    settings = dict(SETTINGS[name])
    if family in WITHOUT_MLP:
        settings.pop("tile")
        return {**settings, "blocks": "none"} if settings else {}
    return settings


def model_of(family: str) -> Any:
    """A tiny model of the family.

    Raises:
        ImportError: it needs a package.
    """
    torch.manual_seed(0)
    config = tiny_config(family)
    config.use_cache = False
    model: Any = build(transformers.AutoModelForCausalLM, config).eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # grouped products have no float64
    return model


def adapted(family: str) -> Any:
    """The same with adapters on every linear layer that may have one, the second factor not zero."""
    model = model_of(family)
    config = lora_config(model, r=4, alpha=None, dropout=0.0, target_modules="all-linear")
    config.init_lora_weights = False
    torch.manual_seed(3)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"The following (rank|alpha)_pattern keys", RuntimeWarning)  # of experts
        model = get_peft_model(model, config)
    model.enable_input_require_grads()
    return model


def gradients(model: Any) -> dict[str, torch.Tensor]:
    """Loss and gradients of one step."""
    model.zero_grad(set_to_none=True)
    ids = torch.randint(
        5, model.config.get_text_config().vocab_size, (2, TOKENS), generator=torch.Generator().manual_seed(1)
    )
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return {"loss": loss.detach(), **found}


def difference(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest error (L2) of any gradient, relative to it, or to a thousandth of the largest where it is smaller."""
    assert got.keys() == expected.keys()
    least = 1e-3 * max(float(value.norm()) for value in expected.values())
    return max(float((got[name] - value).norm()) / max(float(value.norm()), least) for name, value in expected.items())


def tiled(model: Any, settings: dict[str, Any]) -> Any:
    """``model`` in tiles, with activation checkpoints."""
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return seqtile.apply(model, **settings)


def errors(family: str, make: Callable[[str], Any], names: tuple[str, ...]) -> tuple[float, float]:
    """The untiled model's largest error against float64, and that of the tiled ones."""
    exact = gradients(make(family).double())
    own, worst = difference(gradients(make(family)), exact), 0.0
    for name in names:
        if settings := settings_of(family, name):
            model = make(family)
            tiled(model, settings)
            worst = max(worst, difference(gradients(model), exact))
    return own, worst


@dataclass(frozen=True)
class Family:
    """What the table has of one family, in words."""

    name: str
    kinds: str
    state: str
    heads: str
    adapters: str


def describe(family: str) -> Family:
    """What runs in tiles in a family."""
    model = model_of(family)
    kinds = dict.fromkeys(layer.kind for layer in decoder_layers(model) if layer.kind not in ("attention", "MLP"))
    settings: dict[str, Any] = {"tile": 5, "loss": "tiled", "state": 5}
    if family in WITHOUT_MLP:
        settings |= {"blocks": "none"}
        del settings["tile"]
    try:
        report, by_heads = seqtile.apply(model, **settings, heads=1), "yes"
    except UserError:  # attention of no known form
        report, by_heads = seqtile.apply(model, **settings), "no"
    state = next((how for how in ("whole layers", "the mixers alone") if how in report.done.get("state", "")), "no")
    excluded = lora_config(model_of(family), r=4, alpha=None, dropout=0.0, target_modules="all-linear").exclude_modules
    return Family(family, ", ".join(kinds), state, by_heads, ", ".join(f"`{name}`" for name in sorted(excluded or ())))


def buys(family: str) -> str:
    """What tiles buy: the most activations of one layer's backward, by kind of layer, untiled to tiled."""
    config = _shortened(family)
    options = TilingOptions(tile=2048, loss="tiled", loss_tile=2048, checkpoint="layer")
    options = options.without_blocks() if family in WITHOUT_MLP else options
    setup = Setup(options=options, attention="flash", device_type="cuda", scans="kernels", optimizer="sgd")
    try:
        model = build_bare(config, setup, "meta")
        sample = find_depths(config, model).samples[0]
        kinds = [decoder_layers(model)[number].kind for number in sample.layers]
        untiled, tile = (
            _backward(config, replace(setup, options=one), sample, kinds) for one in (options.without_blocks(), options)
        )
    except (UserError, RuntimeError, ValueError) as error:
        return f"not run: {str(error).splitlines()[0]}"
    return ", ".join(f"{kind} {untiled[kind]:.1f} to {tile[kind]:.1f}" for kind in untiled)


def _shortened(family: str) -> Any:
    """A family's default configuration with few experts, by whose number a fake step takes long."""
    config = transformers.CONFIG_MAPPING[family]()
    for name in EXPERTS:
        if experts := getattr(config, name, None):
            setattr(config, name, min(experts, max(FEW_EXPERTS, int(config.num_experts_per_tok))))
    if family == "lfm2_moe":  # whose default says no kind of layer
        config.layer_types = ["conv", "full_attention"] * (config.num_hidden_layers // 2)
    return config


def _backward(config: Any, setup: Setup, sample: LayerSample, kinds: list[str]) -> dict[str, float]:
    """Most activations in the backward of a layer of each kind, in hidden-state tensors per token."""
    found: dict[str, float] = {}
    without = (WEIGHTS, GRADIENTS, OPTIMIZER, CHECKPOINTS)
    for phase, part in fake_step(config, setup, PLANNED, sample=sample).peaks.items():
        if phase.layer is not None and phase.direction != "forward":
            held = part.total - sum(part.terms.get(term, 0) for term in without)
            kind = kinds[phase.layer]
            found[kind] = max(found.get(kind, 0.0), held / (2 * PLANNED * config.get_text_config().hidden_size))
    return found


HEAD = ("family", "layers beside attention", "`state=`", "`heads=`", "adapters leave out")


def page(families: list[Family], about: dict[str, Any]) -> str:
    """The table, with what it was made with: a line for all families that are alike."""
    names: dict[tuple[str, ...], list[str]] = {}
    for family in families:
        names.setdefault(astuple(family)[1:], []).append(family.name)
    lines = [f"| {' | '.join((', '.join(alike), *cells))} |" for cells, alike in names.items()]
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "transformers", "peft"))
    made = f"`{about['command']}`, {about['date'][:10]}, a CPU, {versions}."
    return "\n".join([f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *lines, "", made])


def main() -> int:
    """Examine the families, print their rows, write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="FAMILY", help="these families")
    parser.add_argument("--grid", action="store_true", help="each technique by itself too")
    parser.add_argument("--buys", action="store_true", help="print what tiles buy at the default widths, instead")
    parser.add_argument("--write", action="store_true", help="write the table into docs/techniques.md")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write needs all families: leave out --only")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    names = tuple(SETTINGS) if options.grid else ("all",)
    families = []
    about = stamp(environment(), ["python", *sys.argv])
    if options.buys:
        for family in options.only or KINDS:
            print(f"{family}: {buys(family)}", flush=True)
        return 0
    for family in options.only or KINDS:
        full, lora = errors(family, model_of, names), errors(family, adapted, names)
        families.append(describe(family))
        errors_of = f"{full[0]:.0e} and {full[1]:.0e}, with adapters {lora[0]:.0e} and {lora[1]:.0e}"
        print(f"{', '.join(filter(None, astuple(families[-1])))}; errors untiled and tiled {errors_of}", flush=True)
    if options.write:
        write_between(PAGE, BEGIN, END, [page(families, about)])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
