"""``seqtile verify``: what it prints, what it finds, and how it ends."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import zoo
from numerics.test_verify import DOWN, MLP, Frozen, Patched, Plant, lost_tile, plant, scaled
from refusals import command_refused
from seqtile.cli import main
from seqtile.ops.rng import RandomState

CONFIG = LlamaConfig(
    hidden_size=zoo.HIDDEN,
    intermediate_size=zoo.INTERMEDIATE,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=zoo.VOCABULARY,
    max_position_embeddings=128,
)
ADAPTER = "base_model.model.model.layers.1.mlp.gate_proj.lora_A.default.weight"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("config")
    CONFIG.save_pretrained(directory)
    return directory


def command(path: Path) -> list[str]:
    return ["verify", "--model", str(path), "--tokens", "100"]


def verify(path: Path, *flags: str) -> int:
    return main([*command(path), *flags])


def found(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (line,) = capsys.readouterr().out.splitlines()  # one object, nothing else
    value: dict[str, Any] = json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    return value


def test_a_right_tiling_is_shown_with_its_costs(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(config / "config.json") == 0
    shown = capsys.readouterr().out
    assert shown.endswith("verdict: same gradients\n")
    for words in ("mlp.gate_proj", "self_attn.q_proj", "against float64", "11.00", "MiB", "2 blocks tiled"):
        assert words in shown
    assert all(len(line) <= 120 for line in shown.splitlines())


def test_a_model_with_few_positions_is_compared_on_all_of_them(config: Path, capsys) -> None:
    assert main(["verify", "--model", str(config), "--json"]) == 0
    assert found(capsys)["tokens"] == CONFIG.max_position_embeddings


@pytest.mark.parametrize("flags", [[], ["--dtype", "bfloat16"], ["--checkpoint", "none"]])
def test_json_is_one_object(config: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(config, "--json", "--tile", "16", *flags) == 0
    got = found(capsys)
    assert got["verdict"] == "same" and got["worst"]["of_allowed"] <= 1
    assert got["worst"]["untiled_error"] >= 0 and got["worst"]["tiled_error"] >= 0
    plain = flags == ["--checkpoint", "none"]
    assert got["units"] == {"untiled": 9.0 if plain else 11.0, "tiled": 11.0}
    assert got["tiled"] == {"blocks": 2, "tile": 16, "most_tiles": 7}
    assert got["truth"] == ("float32" if "bfloat16" in flags else "float64")
    assert all(0 < gib < 1 for gib in got["peak_gib"].values())
    assert got["groups"]["mlp.gate_proj"]["parameters"] == 2


def test_real_weights_are_the_ones_that_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    with torch.no_grad():
        model.lm_head.weight.zero_()  # then every token is as likely: the loss is known
    model.save_pretrained(tmp_path)
    capsys.readouterr()  # its progress bar
    assert verify(tmp_path, "--json") == 0
    assert found(capsys)["loss"]["tiled"] == pytest.approx(torch.tensor(zoo.VOCABULARY).log().item())


def test_adapters_are_compared_with_dropout_off_and_on(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verify(config, "--lora", "r=4,dropout=0.2", "--json") == 0
    got = found(capsys)
    assert got["groups"].keys() >= {"mlp.down_proj.lora_A", "mlp.down_proj.lora_B"}
    assert "mlp.down_proj" not in got["groups"]  # the base is frozen
    assert got["with_dropout"]["compared"] == 2 * 7 * 2 + 1
    assert 0 < got["with_dropout"]["difference"] < 1e-4  # both are the same sums in another order


class Lost(Frozen):
    name = ADAPTER


def wrong_mask(_: Any) -> Patched:
    return Patched(RandomState, "replayed", lambda self: nullcontext())


@pytest.mark.parametrize(
    ("fault", "flags", "named"),
    [
        pytest.param(scaled(DOWN, 1.001), [], DOWN, id="scaled gradients"),
        pytest.param(lost_tile, ["--tile", "16"], MLP, id="a tile lost"),
        pytest.param(Lost, ["--lora", "4"], ADAPTER, id="an adapter's gradient missing"),
        pytest.param(wrong_mask, ["--lora", "r=4,dropout=0.5"], "base_model.model.model.layers.", id="wrong mask"),
    ],
)
def test_a_planted_fault_ends_with_1_and_a_name(
    config: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Plant,
    flags: list[str],
    named: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    plant(monkeypatch, fault)
    assert verify(config, "--json", "--checkpoint", "none", *flags) == 1
    got = found(capsys)
    assert got["verdict"] == "differ" and got["worst"]["name"].startswith(named)
    assert ".mlp." in got["worst"]["name"] or named == MLP
    if named == DOWN:
        assert got["worst"]["tiled_error"] > 1e-4 > got["worst"]["untiled_error"]
    assert verify(config, "--checkpoint", "none", *flags) == 1
    assert f"verdict: GRADIENTS DIFFER: {got['worst']['name']}: " in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--tokens", "129"], ("max-length.beyond-positions", "128 positions")),
        (["--tokens", "1"], ("max-length.too-small", "--tokens 1")),
        (["--tile", "100"], ("verify.nothing-compared",)),
        (["--tile", "auto"], ("verify.nothing-compared",)),
        (["--tile", "0"], ("option.malformed", "tile=0")),
        (["--dtype", "int3"], ("recipe.invalid-value", "dtype")),
        (["--lora", "r=0"], ("recipe.invalid-value", "lora.r")),
        (["--model", "missing/"], ("hub.offline",)),
        (["--model", "./missing"], ("model.not-found",)),
        (["--model", __file__], ("model.config-missing",)),
    ],
)
def test_bad_input_ends_with_2(config: Path, flags: list[str], refusal: tuple[str, ...]) -> None:
    command_refused([*command(config), *flags], *refusal)


def test_a_crash_is_not_taken_for_a_difference(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: Any) -> None:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("seqtile.train.verify_model.check", crash)
    assert verify(config) == 70
    shown = capsys.readouterr()
    assert shown.out == "" and "ZeroDivisionError: planted" in shown.err


def test_no_column_is_cut(config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert verify(config) == 0
    (row,) = (line for line in capsys.readouterr().out.splitlines() if "mlp.gate_proj" in line)
    assert len(row.split()) == 6 and 0 < float(row.split()[-1]) < 1


def test_a_config_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    command_refused(command(tmp_path), "model.not-causal")
    for text, reason in (("{", "JSON"), ('{"model_type": "llama", "hidden_size": "x"}', "'hidden_size' expected int")):
        (tmp_path / "config.json").write_text(text)
        command_refused(command(tmp_path / "config.json"), "model.not-loaded", "configuration", reason)


def test_code_of_the_models_own_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig"}}')
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass MineConfig: pass\n")
    command_refused(command(tmp_path), "model.custom-code", "--trust-remote-code")
    assert not (tmp_path / "ran").exists()
