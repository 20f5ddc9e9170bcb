"""One line of a run says what got adapters: which layers, how many parameters, and whether experts did."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import transformers
from peft import get_peft_model

from seqtile.install.adapters import lora_config
from seqtile.train.arguments import describe_adapters

SIZES: dict[str, Any] = dict(
    vocab_size=99, hidden_size=32, intermediate_size=52, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=10,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "no experts": ("Qwen3", {}, False),
    "experts that get adapters": (
        "Qwen3Moe", dict(moe_intermediate_size=24, num_experts=4, num_experts_per_tok=2), True),
    "experts that get none": ("GptOss", dict(num_local_experts=4, num_experts_per_tok=2), False),
    "experts of Mixtral": ("Mixtral", dict(num_local_experts=4, num_experts_per_tok=2), True),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")  # of PEFT's own conversion
@pytest.mark.parametrize("case", MODELS)
def test_the_line_counts_what_trains_and_its_switch_leaves_the_experts_out(case: str) -> None:
    name, sizes, has_experts = MODELS[case]
    config = getattr(transformers, f"{name}Config")(**SIZES, **sizes)

    def adapted(target_modules: Any) -> Any:
        with torch.device("meta"):
            model = getattr(transformers, f"{name}ForCausalLM")(config)
            how = lora_config(model, r=3, alpha=None, dropout=0.0, target_modules=target_modules)
            return get_peft_model(model, how)

    model = adapted("all-linear")
    counts = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    of_experts = sum(count for name, count in counts.items() if ".experts." in name)
    line = describe_adapters(model)
    assert f"{sum(counts.values()):,} parameters" in line and "q_proj" in line and "\n" not in line
    assert (f"(experts: {of_experts:,})" in line) == has_experts == bool(of_experts)
    assert ("the experts have none" in line) == (case == "experts that get none")
    if has_experts:
        targets = re.search(r"target_modules: \[(.*?)\]", line)
        assert targets is not None
        left = adapted(targets[1].split(", "))
        assert {name for name, p in left.named_parameters() if p.requires_grad} == {
            name for name in counts if ".experts." not in name and ".gate." not in name
        }
        assert "the experts have none" in describe_adapters(left)
