"""Rows beyond a model's positions: the factor of its own rotary type, which trains when it is obeyed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig

from refusals import refused
from seqtile.models.configs import max_positions
from seqtile.models.rope_scaling import scale_positions, scaling_for
from zoo import causal_lm

ROPES: dict[str, tuple[str, dict[str, Any], int, float]] = {
    "default": ("llama", {"rope_type": "default", "rope_theta": 1e4}, 128, 2),
    "llama3": ("llama", {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
                         "high_freq_factor": 4.0, "original_max_position_embeddings": 16}, 256, 16),
    "yarn": ("llama", {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                       "original_max_position_embeddings": 32}, 128, 8),
    "linear": ("llama", {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}, 128, 8),
    "dynamic": ("llama", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, 128, 4),
    "longrope": ("llama", {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
                           "long_factor": [2.0] * 8, "original_max_position_embeddings": 32}, 128, 8),
    "gemma 3, linear": ("gemma3_text", {"full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                                        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}, 128, 16),
    "gemma 4, proportional": ("gemma4_text", {"full_attention": {"rope_type": "proportional", "rope_theta": 1e6,
                                                                 "partial_rotary_factor": 0.5},
                                              "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}},
                              128, 2),
}  # fmt: skip
"""Model type, rotary parameters, positions, and the factor that reaches twice as many."""


def config_of(case: str) -> Any:
    model_type, rope, positions, _ = ROPES[case]
    return AutoConfig.for_model(model_type, rope_parameters=rope, max_position_embeddings=positions,
                                layer_types=["full_attention"] * 2, num_hidden_layers=2)  # fmt: skip


@pytest.mark.parametrize("case", ROPES)
def test_the_factor_that_is_named_reaches_the_length_and_keeps_the_type(case: str) -> None:
    config, (_, rope, _, factor) = config_of(case), ROPES[case]
    before = max_positions(config)
    assert before is not None
    scaling = scaling_for(config, 2 * before)
    own = rope.get("full_attention", rope)["rope_type"]
    assert scaling == {"rope_type": "yarn" if own == "default" else own, "factor": factor}
    scale_positions(config, scaling, "m")
    assert max_positions(config) == 2 * before
    assert scaling_for(config, 2 * before) == scaling  # no circle
    scaled = config.rope_parameters.get("full_attention", config.rope_parameters)
    kept = {key: value for key, value in rope.get("full_attention", rope).items() if key not in ("rope_type", "factor")}
    kept.pop("long_factor", None)
    assert {key: scaled[key] for key in kept} == kept and scaled["factor"] == factor
    if "sliding_attention" in rope:
        assert config.rope_parameters["sliding_attention"] == rope["sliding_attention"]


@pytest.mark.parametrize("case", [case for case in ROPES if case not in ("default", "dynamic", "yarn", "llama3")])
def test_twice_the_factor_halves_the_low_frequencies(case: str) -> None:
    def lowest(config: Any) -> torch.Tensor:
        model_type, rope, positions, _ = ROPES[case]
        more = {"layer_types": ["full_attention"] * 2} if "gemma" in model_type else {}
        more |= dict(global_head_dim=16, hidden_size_per_layer_input=8) if model_type == "gemma4_text" else {}
        model = causal_lm(model_type, rope_parameters=config.rope_parameters, head_dim=16, **more,
                          max_position_embeddings=config.max_position_embeddings)  # fmt: skip
        rotary = model.model.rotary_emb
        model(input_ids=torch.zeros(1, positions + 1, dtype=torch.long))
        found = dict(rotary.named_buffers())
        name = next(
            name for name in found if name.endswith("inv_freq") and "sliding" not in name and "orig" not in name
        )
        return found[name][found[name] > 0][-1]

    before = lowest(config_of(case))
    config = config_of(case)
    scale_positions(config, scaling_for(config, 2 * (max_positions(config) or 0)) or {}, "m")
    torch.testing.assert_close(lowest(config), before / 2)


@pytest.mark.parametrize("case", [case for case in ROPES if case != "default"])
def test_the_type_is_never_replaced(case: str) -> None:
    other = "yarn" if case != "yarn" else "linear"
    with refused("rope-scaling.other-type-than-trained"):
        scale_positions(config_of(case), {"rope_type": other, "factor": 4}, "m")


def test_a_sentence_that_is_obeyed_trains(tmp_path: Any) -> None:
    import tiny_run
    from seqtile.train.recipe import build_recipe
    from seqtile.train.run import train

    rope = {**ROPES["llama3"][1], "original_max_position_embeddings": 32}
    tiny_run.save_model(tmp_path / "model", rope_parameters=rope)
    rows = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": list(range(1, 200)) * 2}])
    values = {"model": str(tmp_path / "model"), "dataset": str(rows), "output": str(tmp_path / "out"), "steps": 1,
              "max_length": 2 * tiny_run.POSITIONS, "tile": 64}  # fmt: skip
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "weights")  # refused before it is looked for
    with refused("max-length.beyond-positions", "256 positions") as caught:
        train(build_recipe(values, {})[0])
    (tmp_path / "weights").rename(tmp_path / "model" / "model.safetensors")
    told = re.search(r"'(rope_scaling: .*?)'", str(caught.value))
    assert told is not None
    obeyed = {**values, **yaml.safe_load(told[1])}
    assert obeyed["rope_scaling"] == {"rope_type": "llama3", "factor": 16}
    assert train(build_recipe(obeyed, {})[0]).step == 1
