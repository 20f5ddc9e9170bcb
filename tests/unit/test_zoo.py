"""Widths of the tests' tiny models differ, so that a width that is read from the wrong module raises."""

from __future__ import annotations

import itertools
import re

import pytest
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.pytorch_utils import Conv1D

from zoo import ARCHITECTURES, ENCODERS, HYBRIDS, SEQ2SEQ, causal_lm, tokens, with_encoder

OUTPUTS = {
    "queries": r"q_proj|q_b_proj|q|query",
    "keys": r"k_proj|k|key",
    "mlp": r"gate_proj|up_proj|fc1|c_fc|dense_h_to_4h|wi(_[01])?|w[13]|intermediate.dense",
    "state": r"in_proj_z",
}
INPUTS = {
    "queries": r"self_attn.o_proj|o|attn.c_proj|(self_)?attention.dense|attn.Wo",
    "mlp": r"down_proj|fc2|mlp.c_proj|dense_4h_to_h|wo|w2|mlp.Wo",
    "state": r"(linear_attn|mamba).out_proj",
}
"""Names of the linear layers whose output or input has a width, by what the width is."""

ONE_WIDTH = {"queries and hidden"}
NO_GROUPS = {"queries and keys"}
EQUAL = {
    **dict.fromkeys(("gpt2", "falcon", "gpt_neox", "modernbert"), ONE_WIDTH),
    **dict.fromkeys(("opt", "bert", "roberta", "mpnet", "bart", "mbart", "pegasus"),
                    ONE_WIDTH | NO_GROUPS | {"keys and hidden"}),
    **dict.fromkeys(("t5", "mt5", "switch_transformers"), NO_GROUPS),
}  # fmt: skip
"""Architectures whose config has no key that would tell two widths apart."""


def widths_of(model: nn.Module) -> dict[str, set[int]]:
    """Every width of the model, by what it is of."""
    widths: dict[str, set[int]] = {kind: set() for kind in ("queries", "keys", "mlp", "state")}
    vocabulary, hidden = model.get_input_embeddings().weight.shape
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D):
            continue
        outputs, inputs = module.weight.shape if isinstance(module, nn.Linear) else module.weight.shape[::-1]
        for names, width in ((OUTPUTS, outputs), (INPUTS, inputs)):
            for kind, pattern in names.items():
                if re.search(rf"(^|\.)({pattern})$", name):
                    widths[kind].add(width)
    for name, weight in model.named_parameters():
        if name.endswith("experts.down_proj"):  # [E, D, F] or [E, F, D]
            widths["mlp"] |= {*weight.shape[1:]} - {hidden}
    ids = tokens()
    return {**widths, "hidden": {hidden}, "vocabulary": {vocabulary}, "tokens": {ids.shape[1], ids.numel()}}


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of ModernBERT in transformers 5.0
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *HYBRIDS, *ENCODERS, *SEQ2SEQ])
def test_no_two_widths_are_equal_but_those_that_the_architecture_makes_equal(architecture: str) -> None:
    if architecture not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {architecture}")
    build = with_encoder if architecture in ENCODERS | SEQ2SEQ else causal_lm
    widths = widths_of(build(architecture))
    assert widths["queries"] and widths["mlp"]
    equal = {f"{one} and {other}" for one, other in itertools.combinations(widths, 2) if widths[one] & widths[other]}
    assert equal == EQUAL.get(architecture, set()), widths
