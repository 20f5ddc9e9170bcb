"""``seqtile plan``: what it answers, what it refuses, and that its answers hang together."""

from __future__ import annotations

import gc
import json
import math
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

import seqtile
from refusals import command_refused, refused
from seqtile._errors import UserError
from seqtile.cli import console, main
from seqtile.cli.plan_command import parse_adapters
from seqtile.counting.products import count_products
from seqtile.host_weights import installed_host_weights
from seqtile.models import configs
from seqtile.models.configs import NAMED, is_masked_lm, read_config
from seqtile.options import changed
from seqtile.planner import explain as explain_module
from seqtile.planner.accelerators import DEVICES, Device, find_device
from seqtile.planner.explain import explain, next_step, proposals, recipe
from seqtile.planner.extrapolate import fit_for
from seqtile.planner.fake_step import build, fake_step
from seqtile.planner.flops import forward_of_layers
from seqtile.planner.layer_structure import count_weights
from seqtile.planner.live_at_peaks import CHECKPOINTS, KEPT
from seqtile.planner.memory_plan import WORTH, Estimate, Planner, choose_attention_saved, plan
from seqtile.planner.names import STATE_BYTES
from seqtile.planner.phases import Phase
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import CONSTANTS, ZERO_BUCKET, frozen_bytes, on_device, on_host
from seqtile.planner.step_config import OPTIMIZERS, PLANNED, Lora, Setup, make_optimizer
from seqtile.planner.techniques import Dial
from seqtile.recognise.candidates import layer_steps
from seqtile.recognise.trace import in_a_thread
from seqtile.train.fit import request_of as planned_again
from seqtile.train.load import load_config
from seqtile.train.recipe import build_recipe, parse_lora, read_recipe, resolve

SIZES: dict[str, Any] = dict(
    hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=48, vocab_size=1024, max_position_embeddings=65536, pad_token_id=0,
)  # fmt: skip
DEVICE = Device("small", 3 * 2**29, 10.0, "made up")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    AutoConfig.for_model("llama", **SIZES).save_pretrained(path)
    return path


@pytest.fixture
def proposes() -> None:
    """Of a test that looks at what the command proposes."""


@pytest.fixture(autouse=True)
def _proposes_nothing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the command proposes nothing, which takes ten seconds."""
    if "proposes" not in request.fixturenames:
        monkeypatch.setattr(explain_module, "next_step", lambda *_: None)


def request_of(folder: Path, **changes: Any) -> Request:
    return changed(Request(str(folder), read_config(str(folder)), DEVICE), **changes)


@pytest.fixture(scope="module")
def planner(folder: Path) -> Planner:
    return Planner(request_of(folder))


@pytest.fixture(scope="module")
def sharded(folder: Path) -> Iterator[Planner]:
    planner = Planner(request_of(folder, engine="fsdp2", gpus=8))
    planner.lines(16384)
    yield planner


def other(planner: Planner, **changes: Any) -> Planner:
    """A planner of the same step, so without fake runs of its own."""
    again = Planner(changed(planner.request, **changes))
    again.share(planner)
    return again


def terms(planner: Planner, tokens: int = 16384) -> Estimate:
    return planner.estimate(tokens)


def test_the_command_answers_in_one_object(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = tmp_path / "recipe.yaml"
    given = ["--device", "1.5GiB", "--host-memory", "1TiB", "--offload", "checkpoints", "--max-length", "16384"]
    arguments = ["plan", "--model", str(folder), *given]
    assert main([*arguments, "--json", "--recipe", str(written)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {
        "fits", "peak_device_gib", "peak_host_gib", "peak_at", "terms", "max_length", "limited_by", "recipe",
        "not_modelled",
    } <= found.keys()  # fmt: skip
    peak = found["peak_device_gib"]
    assert peak["low"] < peak["expected"] < peak["high"]
    assert found["fits"] is (peak["expected"] <= 1.5)
    assert sum(found["terms"]["device_gib"].values()) == pytest.approx(peak["expected"])
    assert sum(found["terms"]["host_gib"].values()) == pytest.approx(found["peak_host_gib"]["expected"])
    assert build_recipe(read_recipe(written), {"dataset": "rows.jsonl"})[0].max_length == 16384


@pytest.mark.usefixtures("proposes")
def test_the_command_says_it_in_words(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", str(folder), "--device", "1.5GiB", "--explain"]) == 0
    text = capsys.readouterr().out
    begins = ("Longest sequence that fits", "Limited by", "Next: --checkpoint ", "Not included", "peak in the")
    for words in begins:
        assert words in text
    assert "[tokens, tokens]" in text  # not taken for markup


def test_a_length_beyond_the_positions_is_planned_with_what_the_run_needs(folder: Path, tmp_path: Path, capsys) -> None:
    written, lengths = tmp_path / "recipe.yaml", ["--max-length", "100000", "--device", "80GiB", "--json"]
    assert main(["plan", "--model", str(folder), *lengths, "--recipe", str(written)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["fits"] and shown["max_length"] == 65536 and shown["max_length_beyond_positions"] >= 100_000
    assert any("rope_scaling" in note for note in shown["notes"])
    load_config(build_recipe(read_recipe(written), {"dataset": "rows.jsonl"})[0])  # refuses too few positions
    CONFIG_MAPPING["gpt2"](n_layer=1, n_positions=64).save_pretrained(tmp_path)
    command_refused(["plan", "--model", str(tmp_path), *lengths], "max-length.beyond-positions", "64 positions")


@pytest.mark.parametrize("lengths", [[], ["--max-length", "6000"]], ids=["longest", "asked beyond"])
@pytest.mark.parametrize("named", [True, False], ids=["a shape", "a config"])
def test_the_longest_length_is_within_the_positions_and_what_is_beyond_is_another_line(
    named: bool, lengths: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {name: value for name, value in SIZES.items() if name != "max_position_embeddings"}
    monkeypatch.setitem(configs.NAMED, "a-shape", ("llama", sizes))
    monkeypatch.setitem(configs.NAMED_POSITIONS, "a-shape", (4096, "yarn", 1))
    AutoConfig.for_model("llama", **{**SIZES, "max_position_embeddings": 4096}).save_pretrained(tmp_path)
    model = "a-shape" if named else str(tmp_path)
    command = ["plan", "--model", model, "--device", "1.5GiB", "--checkpoint", "layer", *lengths]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "fits: 4,096 tokens" in shown and "Limited by positions" in shown and "Next:" not in shown
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    beyond, sure = found["max_length_beyond_positions"], found["sure_length_beyond_positions"]
    assert found["sure_length"] <= sure <= beyond
    assert (found["max_length"], found["next"]) == (4096, None) and beyond > 4096
    factor = -(-beyond // 4096)
    assert f"positions: {beyond:,} tokens, with 'rope_scaling: {{rope_type: yarn, factor: {factor}}}'" in shown


@pytest.mark.usefixtures("proposes")
def test_a_length_beyond_the_positions_that_does_not_fit_has_a_next_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AutoConfig.for_model("llama", **{**SIZES, "max_position_embeddings": 4096}).save_pretrained(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--device", "1.5GiB", "--checkpoint", "layer"]
    main([*command, "--json"])
    beyond = json.loads(capsys.readouterr().out)["max_length_beyond_positions"]
    assert main([*command, "--max-length", str(6 * beyond // 5), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["next"]["max_length"] > beyond, found["next"]


def test_a_setting_whose_step_does_not_run_is_left_out(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the verdict, an error of the model's own code was the command's."""
    fails = lambda *_, **__: AutoConfig.for_model("no such model")  # noqa: E731
    monkeypatch.setattr(Planner, "longest", fails)
    monkeypatch.setattr(explain_module, "choose_settings", fails)
    assert next_step(planner, 128) is None


BAD = [
    (["--device", "h1000"], ("device.unknown", "h100'?")),
    (["--device", "toaster"], ("device.unknown", "h200, h100")),
    (["--model", "/nowhere/config.json"], ("model.not-found",)),
    (["--gpus", "8", "--engine", "zero3", "--sp-size", "8"], ("sp-size.heads-do-not-divide", "4 attention heads")),
    (["--max-length", "1"], ("max-length.too-small",)),
    (["--engine", "zero9"], ("option.unknown-choice", "engine", "single")),
    (["--optimizer", "adam"], ("option.unknown-choice", "optimizer", "adamw")),
    (["--offload", "brains"], ("plan.offload-malformed",)),
    (["--checkpoint", "some"], ("option.unknown-choice", "checkpoint", "layer")),
    (["--tile", "many"], ("option.malformed", "'many'")),
    (["--keep", "2"], ("option.malformed", "0.0 to 1.0")),
    (["--keep", "some"], ("option.malformed", "'some'")),
    (["--keep", "auto"], ("keep.auto-in-plan",)),
    (["--attention", "linear"], ("option.unknown-choice", "attention", "flash")),
    (["--blocks", "some"], ("option.unknown-choice", "blocks", "mlp")),
    (["--blocks", "mlp", "--tile", "none"], ("blocks.with-tile-none",)),
    (["--lora", "r=4,target_modules=nothing_like_it"], ("plan.adapters-not-added", "nothing_like_it")),
    (["--lora", "r=none"], ("lora.malformed",)),
    (["--lora", "16", "--full"], ("plan.full-with-lora",)),
    (["--host-memory", "much"], ("plan.host-memory-malformed",)),
    (["--host-memory", "64"], ("plan.host-memory-malformed",)),
    (["--gpus", "0"], ("option.not-positive", "gpus")),
    (["--batch-size", "0"], ("option.not-positive", "batch size")),
    (["--recipe", "/nowhere/recipe.yaml"], ("plan.recipe-directory-missing",)),
    (["--recipe", "/"], ("plan.recipe-is-directory",)),
]


@pytest.mark.parametrize(
    ("arguments", "refusal"), BAD, ids=lambda value: " ".join(value) if isinstance(value, list) else ""
)
def test_bad_input_is_one_sentence(arguments: list[str], refusal: tuple[str, ...], folder: Path) -> None:
    given = ["plan", *([] if "--model" in arguments else ["--model", str(folder)]), *arguments]
    command_refused(given, *refusal)


NAMES = [["--device", "h1000"], ["--model", "llama-9b"], ["--engine", "zero9"], ["--optimizer", "adam"],
         ["--offload", "brains"], ["--lora", "r=none"], ["--gpus", "0"], ["--gpus", "8"], ["--host-memory", "64"],
         ["--attention", "linear"], ["--checkpoint", "some"], ["--recipe", "/nowhere/recipe.yaml"]]  # fmt: skip


def test_what_is_wrong_at_first_sight_is_refused_before_anything_heavy_is_imported() -> None:
    code = (
        "import json, sys\n"
        "from seqtile.cli import main\n"
        "for one in json.loads(sys.argv[1]):\n"
        "    assert main(['plan', *([] if '--model' in one else ['--model', 'llama-8b']), *one]) == 2, one\n"
        "assert not {'torch', 'transformers', 'huggingface_hub'} & sys.modules.keys()\n"
    )
    done = subprocess.run([sys.executable, "-c", code, json.dumps(NAMES)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("\n") == len(NAMES)
    assert "did you mean 'llama-8b'?" in done.stderr


@pytest.mark.parametrize(("length", "code"), [(1024, 0), (65536, 1)])
def test_the_command_ends_with_its_answer_and_what_was_registered_for_its_end(
    length: int, code: int, folder: Path
) -> None:
    """It ends without Python's last clean-up."""
    command = ["plan", "--model", str(folder), "--device", "1.5GiB", "--checkpoint", "layer", "--json"]
    command += ["--max-length", str(length)]
    program = (
        "import atexit, sys\n"
        "from seqtile.cli import console\n"
        "class Last:\n"
        "    def __del__(self): print('cleaned up', file=sys.stderr)\n"
        "last = Last()\n"
        "atexit.register(print, 'at exit', file=sys.stderr)\n"
        "console()\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    assert json.loads(done.stdout)["fits"] == (code == 0)
    assert "at exit" in done.stderr and "cleaned up" not in done.stderr


@pytest.mark.parametrize("arguments", [["--max-length", "65536"], ["--device", "64MiB"]], ids=["asked", "any"])
def test_what_does_not_fit_is_exit_code_1(
    arguments: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", str(folder), "--device", "1GiB", *arguments]) == 1
    shown = capsys.readouterr()
    assert "do not fit: " in shown.out or ("at any length" in shown.err and shown.err.count("\n") == 1)


def test_where_nothing_fits_json_is_one_object_with_what_limits_it(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.yaml"
    assert main(["plan", "--model", str(folder), "--device", "64MiB", "--json", "--recipe", str(recipe)]) == 1
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert not found["fits"] and found["max_length"] == found["sure_length"] == 0 and found["recipe"] is None
    assert found["limited_by"].startswith("device memory: ")
    assert found["peak_device_gib"]["expected"] > found["device_gib"]
    assert "at any length" in shown.err and shown.err.count("\n") == 1
    assert not recipe.exists()


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("bart", "an encoder-decoder"),
        ("whisper", "an encoder-decoder"),
        ("vit", "not a causal language model"),
        ("llava", "images="),
    ],
)
def test_what_is_no_language_model_of_one_length_is_refused(kind: str, value: str, tmp_path: Path) -> None:
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    command_refused(["plan", "--model", str(tmp_path), "--device", "h100"], "plan.model-not-causal", value)


@pytest.mark.parametrize(
    "flags",
    [[], ["--max-length", "4096"], ["--loss", "grpo"], ["--images", "2"], ["--engine", "zero3", "--gpus", "2"]],
    ids=" ".join,
)
def test_an_encoder_is_refused_in_one_sentence(flags: list[str], tmp_path: Path) -> None:
    AutoConfig.for_model("bert", num_hidden_layers=2).save_pretrained(tmp_path)
    command_refused(["plan", "--model", str(tmp_path), "--device", "h100", *flags], "model.encoder", "(bert)")
    given, _ = build_recipe({"model": str(tmp_path), "dataset": "d.jsonl", "max_length": 128}, {})
    with refused("model.encoder", "(bert)"):
        planned_again(resolve(given), memory=2**30)
    assert not is_masked_lm(AutoConfig.for_model("bert", is_decoder=True)), "what may be a decoder is no encoder then"


@pytest.mark.skipif(version("transformers").startswith("5.0."), reason="5.0 calls no loss function in this model")
def test_a_tower_that_is_planned_along_is_said(folder: Path) -> None:
    request = request_of(folder)
    config = AutoConfig.for_model(
        "gemma3",
        text_config={"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
                     "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512},
        vision_config={"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
    )  # fmt: skip
    notes = Planner(replace(request, config=config)).notes()
    assert any("the vision tower's weights are included" in note for note in notes)
    assert not any("tower" in note for note in Planner(request).notes())


@pytest.mark.parametrize("kind", ["gemma3n_text", "gemma4_text"])
def test_embeddings_for_each_layer_are_refused(kind: str, tmp_path: Path) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {kind}")
    AutoConfig.for_model(kind).save_pretrained(tmp_path)
    command_refused(["plan", "--model", str(tmp_path), "--device", "h100"], "plan.embeddings-per-layer")


def test_a_model_without_decoder_layers_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=64).save_pretrained(tmp_path)
    command_refused(["plan", "--model", str(tmp_path), "--device", "h100"], "blocks.nothing-to-tile")


@pytest.mark.skipif(version("transformers").startswith("5.0."), reason="5.0 calls no loss function in this model")
def test_a_model_without_attention_is_planned_untiled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=64).save_pretrained(tmp_path)
    command = ["plan", "--model", str(tmp_path), "--device", "h100", "--tile", "none", "--max-length", "4096", "--json"]
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out)["fits"]


@pytest.mark.parametrize("lora", [Lora(3, alpha=7.0), Lora(3, alpha=7.0, dropout=0.05)], ids=["no dropout", "dropout"])
def test_one_proof_does_for_the_adapters_of_all_layers(
    lora: Lora, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PEFT tells each adapter the name of its layer; with it every layer of a plan took a trace of its own.

    Dropout is an accelerator's in a step for one, and so it has to be where the step is proven.
    """
    traced = []

    def traces(function: Any) -> Any:
        if any(name.endswith(".mlp") for name, _ in function.args[0].members):  # norms have proofs of their own
            traced.append(function)
        return in_a_thread(function)

    def layers(*given: Any) -> Any:
        of_layers.append(given)
        return layer_steps(*given)

    of_layers: list[Any] = []
    monkeypatch.setattr("seqtile.recognise.candidates.layer_steps", layers)
    monkeypatch.setattr("seqtile.recognise.proof.in_a_thread", traces)
    setup = Setup(lora=lora, autocast=True, device_type="cuda")  # which no other test has, whose proof would do
    built = build(read_config(str(folder)), setup, "meta")
    assert len(built.blocks) == 4 and len(traced) == len(of_layers) == 1  # an adapter's two matrices are no MLP
    fake_step(read_config(str(folder)), replace(setup, options=replace(setup.options, tile=64)), 256)
    assert len(traced) == 1  # a step calls the blocks in the mode that they were proven in


def test_the_longest_fits_and_a_little_more_does_not(planner: Planner) -> None:
    longest, limit = planner.longest()
    assert planner.fits(planner.estimate(longest))
    assert not planner.fits(planner.estimate(round(1.02 * longest)))
    assert limit.startswith("device memory: ")
    assert 0 < planner.sure() < longest


def test_where_weights_alone_do_not_fit_only_a_short_row_is_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths: list[int] = []

    def noted(config: Any, setup: Setup, tokens: int, *arguments: Any) -> Any:
        lengths.append(tokens)
        return fake_step(config, setup, tokens, *arguments)

    monkeypatch.setattr("seqtile.planner.extrapolate.fake_step", noted)
    assert main(["plan", "--model", str(folder), "--device", "64MiB"]) == 1
    assert "at any length" in capsys.readouterr().err
    assert lengths and max(lengths) < 1024


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"lora": Lora(8)},
        {"checkpoint": None},
        {"loss": None, "loss_tile": "auto"},
        {"attention": "eager"},
        {"blocks": "mlp+norm+projections", "heads": 1, "tile": 512},
        {"keep": 0.5, "lora": Lora(8)},
        {"keep": 0.3, "checkpoint": None},
        {"keep": 1.0, "blocks": "mlp+norm+projections"},
        {"keep": "memory:40MiB", "precision": "bfloat16"},
        {"keep": 0.5, "loss_tile": 4096, "batch": 3},
    ],
    ids=["all", "adapters", "no checkpoints", "whole loss", "eager", "heads", "half kept", "some kept",
         "all kept", "bytes kept", "three sequences"],
)  # fmt: skip
def test_a_step_of_the_whole_model_holds_what_is_planned(changes: dict[str, Any], folder: Path) -> None:
    """At its own length and depth, whatever was planned before: within 1 %, a third of the band that is printed."""
    request = request_of(folder, **{"tile": 1024, "loss_tile": 1024} | changes)
    planner = Planner(request)
    planner.lines(4096)
    setup = planner.resolved(8192)
    whole = fake_step(request.config, setup, 8192, planner.workspace)
    planned = planner.lines(8192).at(8192, keep=float(setup.options.keep))
    error = max(sum(terms.values()) for terms in planned.values()) / whole.peak - 1
    assert abs(error) < 0.01


def test_a_mask_that_short_rows_do_not_have_is_planned() -> None:
    """Transformers builds one under sdpa where a row is longer than the window."""
    config = AutoConfig.for_model("mistral", **SIZES, sliding_window=4096)
    request = changed(Request("windows", config, DEVICE), attention="sdpa", tile=512, loss_tile=512)
    for tokens in (16384, 2048):
        planner = Planner(request)
        whole = fake_step(config, planner.resolved(tokens), tokens, planner.workspace)
        planned = planner.lines(tokens).at(tokens)
        assert max(sum(terms.values()) for terms in planned.values()) == pytest.approx(whole.peak, rel=1e-3)


def test_the_longest_fits_where_its_own_tiles_fit_less() -> None:
    """With the tiles of the longest more is held than with those of the length that was looked at before it."""
    changes: dict[str, Any] = {"offload": True, "engine_offload": ("weights",), "engine": "zero3", "gpus": 8}
    planner = Planner(changed(Request("llama-8b", read_config("llama-8b"), find_device("rtx4090")), **changes))
    longest, _ = planner.longest(131072)
    assert longest >= planner.sure() and planner.fits(planner.estimate(longest))
    again = Planner(planner.request).estimate(longest)
    assert again.device.expected < 1.005 * planner.request.device.memory


@pytest.mark.parametrize("asked", [[], ["--max-length", "65536"]], ids=["longest", "too long"])
def test_the_answer_is_printed_before_anything_is_proposed(
    asked: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    printed: list[str] = []

    def nothing(*_: Any) -> None:
        printed.append(capsys.readouterr().out)

    monkeypatch.setattr("seqtile.planner.explain.next_step", nothing)
    assert main(["plan", "--model", str(folder), "--device", "1GiB", *asked]) == bool(asked)
    (answer,) = printed
    assert "GiB at the peak" in answer and "Longest sequence that fits: " in answer
    assert ("do not fit: " in answer) is bool(asked)
    assert capsys.readouterr().out.startswith("Step of 1 sequence: ")


@pytest.mark.parametrize(("command", "collects"), [("plan", False), ("doctor", True)])
def test_a_plan_is_made_without_the_cycle_collector(
    command: str, collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which stays off to the end of the process: once on again, it would look through a million objects."""
    seen: list[bool] = []
    monkeypatch.setattr("sys.argv", ["seqtile", command])
    monkeypatch.setattr("seqtile.cli.main", lambda: seen.append(gc.isenabled()) or 0)

    def ended(code: int) -> None:
        seen.append(gc.isenabled())
        raise SystemExit(code)

    monkeypatch.setattr("seqtile._compat.end_process", ended)
    assert gc.isenabled()
    try:
        with pytest.raises(SystemExit):
            console()
    finally:
        gc.enable()
    assert seen == ([True] if collects else [False, False])


def test_a_search_ends_where_few_tiles_are_none_to_keep() -> None:
    """A tenth of nine tiles is none, and of ten one: runs that keep none tell nothing of rows that keep some."""
    config = read_config("qwen3-8b")
    changes = dict(engine="zero3", gpus=16, nodes=2, keep=0.1, precision="float32")
    planner = Planner(changed(Request("qwen3-8b", config, find_device("h100")), **changes))
    longest, _ = planner.longest()
    beyond = round(1.1 * longest)
    assert planner.resolved(longest).options.keep == 0 < planner.resolved(beyond).options.keep
    assert planner.fits(Planner(planner.request).estimate(longest))
    assert not planner.fits(Planner(planner.request).estimate(beyond))


def test_smaller_states_are_not_tried_where_the_host_has_room_for_all(planner: Planner) -> None:
    """They would change nothing on the device; where checkpoints fill the host, they make room for some."""
    request = changed(planner.request, engine="zero2", gpus=2, engine_offload=("optimizer",), offload=True)
    request = replace(request, device=Device("larger", 2**33, 10.0, "made up"))
    roomy, full = Planner(request), Planner(replace(request, host_memory=2**34))  # which two processes may take
    full.share(roomy)
    found = []
    for one in (roomy, full):
        before = [technique.name for technique in chain(*proposals(one))]
        one.longest()
        found.append([technique.name for technique in chain(*proposals(one))])
        assert "8-bit states" in before
    assert "8-bit states" not in found[0] and "8-bit states" in found[1]


def test_a_short_row_that_fits_at_the_high_estimate_is_not_called_none(folder: Path) -> None:
    """Shorter than the grain that lengths are looked at in, which grows with the ranks that share a sequence."""
    config = read_config(str(folder))
    config.max_position_embeddings = 200
    short = Planner(request_of(folder, config=config, engine="zero3", gpus=4, sp_size=4, device=find_device("h100")))
    assert short.longest() == (200, "positions")
    assert short.sure() == 200


def test_a_larger_device_is_limited_by_the_positions(planner: Planner) -> None:
    assert other(planner, device=find_device("h200")).longest() == (65536, "positions")


def test_what_the_host_has_no_room_for_stays_on_the_device(planner: Planner) -> None:
    held = 4 * 16384 * 256 * 4  # layers, tokens, hidden, fp32 weights under autocast
    process = CONSTANTS["host process"].high
    half = other(planner, offload=True, host_memory=round(process + held / 2))
    estimate = half.estimate(16384)
    assert estimate.moved == pytest.approx(0.5)
    assert estimate.host_terms["checkpointed hidden states"] == pytest.approx(held / 2)
    assert recipe(half, 16384)["offload"] == f"{held // 2 // 2**20}MiB"
    all_of_it, nothing = (other(planner, offload=True, host_memory=round(process + room)) for room in (2 * held, 0))
    bytes_on_device = [one.estimate(16384).device.expected for one in (all_of_it, half, nothing)]
    assert bytes_on_device == sorted(bytes_on_device) and bytes_on_device[0] < bytes_on_device[2]
    assert recipe(all_of_it, 16384)["offload"] is True
    assert nothing.longest() == planner.longest()
    assert recipe(nothing, 16384)["offload"] is False
    _, saving = choose_attention_saved(half, 16384)
    assert saving.more and "the host is full" in saving.why
    # whole layers are moved, and no bound is called for less than a MiB
    most = other(planner, offload=True, host_memory=round(process + 0.7 * held))
    assert most.estimate(16384).moved == 0.5


def test_a_size_bounds_the_checkpoints_of_a_plan_as_a_full_host_does(planner: Planner) -> None:
    held = 4 * 16384 * 256 * 4  # layers, tokens, hidden, fp32 weights under autocast
    process = CONSTANTS["host process"].high
    full = other(planner, offload=True, host_memory=round(process + held / 2))
    for host_memory in (None, 2**40):
        bounded = other(planner, offload=f"{held // 2 // 2**20}MiB", host_memory=host_memory)
        assert bounded.estimate(16384).moved == 0.5
        assert bounded.estimate(16384).device == full.estimate(16384).device
        assert recipe(bounded, 16384)["offload"] == f"{held // 2 // 2**20}MiB"
        assert "beyond the size" in choose_attention_saved(bounded, 16384)[1].why
    roomy = other(planner, offload="1GiB")
    assert roomy.estimate(16384).moved == 1.0 and recipe(roomy, 16384)["offload"] == "1GiB"


@pytest.mark.parametrize("qlora", [False, True])
def test_frozen_weights_on_the_host_are_those_of_the_layers(folder: Path, qlora: bool) -> None:
    """What ``apply`` moves, byte by byte, and two layers of it back on the device while layers run."""
    config = read_config(str(folder))
    request = request_of(folder, config=config, lora=Lora(4), qlora=qlora)
    here, there = Planner(request), Planner(changed(request, offload="weights"))
    there.share(here)
    size = 0.5 if qlora else 2.0
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    report = seqtile.apply(model, blocks="none", offload="weights")
    (standing,) = installed_host_weights(model)
    assert standing.stream is not None and report.done["weights"].startswith("weights of")
    moved = size / 2 * standing.host_bytes
    layer = size / 2 * sum(weight.nbytes for weight in standing.stream.layers[0].weights)
    estimates = [planner.estimate(16384) for planner in (here, there)]
    before, after = (estimate.terms for estimate in estimates)
    assert before["weights"] - after["weights"] == pytest.approx(moved, rel=1e-6)
    buffers = after["engine buffers"] - before.get("engine buffers", 0.0)
    assert buffers == pytest.approx(2 * layer, rel=0.01)  # and two norms
    assert estimates[0].device.expected - estimates[1].device.expected == pytest.approx(moved - buffers)
    assert estimates[1].host_terms["weights"] >= moved
    assert recipe(there, 16384)["offload"] == "weights"


def test_a_plan_says_from_which_length_copying_weights_is_hidden(folder: Path) -> None:
    request = request_of(folder, lora=Lora(4), offload="weights", device=find_device("h100"))
    (note,) = (note for note in Planner(request).notes() if "frozen weights" in note)
    tokens = int(re.findall(r"from ([\d,]+) tokens", note)[0].replace(",", ""))
    counts = Planner(request).counts
    seconds = frozen_bytes(request, counts) / 55e9
    assert forward_of_layers(request, counts, tokens).seconds(989, 1) >= seconds
    assert forward_of_layers(request, counts, tokens - tokens // 8 - 128).seconds(989, 1) < seconds


@pytest.mark.parametrize("changes", [
    {"lora": Lora(4, r".*\.(q_proj|v_proj)", 12.0, 0.1), "qlora": True}, {"optimizer": "sgd-momentum", "heads": 1},
    {"blocks": "mlp+norm+projections", "batch": 2, "accumulation": 2, "checkpoint": "attention-saved"},
])  # fmt: skip
def test_the_recipe_is_planned_as_what_it_was_made_of(folder: Path, changes: dict[str, Any]) -> None:
    request = request_of(folder, **changes)
    read, _ = build_recipe(recipe(Planner(request), 4096), {"dataset": "rows.jsonl"})
    assert read.fit is False
    again = planned_again(resolve(read), DEVICE.memory)
    for name in ("lora", "qlora", "optimizer", "batch", "accumulation", "attention"):
        assert getattr(again, name) == getattr(request, name), name
    assert replace(again.options, loss_tile="auto") == request.options
    assert again.options.loss_tile == Planner(request).resolved(4096).options.loss_tile


def test_a_precision_is_in_the_recipe(planner: Planner) -> None:
    exact = recipe(Planner(replace(planner.request, precision="float32"), like=planner), 4096)
    assert exact["dtype"] == "float32" and "dtype" not in recipe(planner, 4096)
    read, _ = build_recipe({**exact, "dataset": "rows.jsonl"}, {})
    assert planned_again(resolve(read), DEVICE.memory).precision == "float32"


def test_dropout_of_adapters_is_counted(folder: Path) -> None:
    config = read_config(str(folder))
    options = replace(PLANNED, loss_tile=256)
    plain, dropped = (
        fake_step(config, Setup(lora=Lora(4, "all-linear", None, share), options=options), 512).peak
        for share in (0.0, 0.1)
    )
    assert dropped > plain


@pytest.mark.parametrize(("asked", "flags"), [(0, "--cheap"), (250, "--cheap"), (350, "--dear"), (900, "--dear")])
def test_the_next_step_reaches_what_was_asked(
    planner: Planner, monkeypatch: pytest.MonkeyPatch, asked: int, flags: str
):
    """A cheap setting that doubles the length is proposed, unless only a dearer one reaches what was asked."""
    lengths = {"cheap": 300, "dear": 400}

    class Reaching:
        at_least = staticmethod(lambda _: 0)

        def __init__(self, request: Any, **_: Any) -> None:
            self.longest = lambda furthest: (lengths[request.model], "")

    def named(name: str) -> Dial:
        return Dial(name, {"model": name}, "", f"--{name}")

    monkeypatch.setattr(explain_module, "Planner", Reaching)
    monkeypatch.setattr(explain_module, "proposals", lambda _: ([named("cheap")], [named("dear")]))
    monkeypatch.setattr(explain_module, "_other_settings", lambda *_: iter(()))
    step = next_step(planner, 100, asked)
    assert step is not None and step.flags == flags


@pytest.mark.parametrize("given", ["", "--checkpoint layer --keep 0.5"])
@pytest.mark.usefixtures("proposes")
def test_the_next_step_is_what_it_promises(folder: Path, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "--model", str(folder), "--device", "1.5GiB", *given.split(), "--json"]
    main(command)
    found = json.loads(capsys.readouterr().out)
    step = found["next"]
    assert step["max_length"] > found["max_length"]
    main([*command, *shlex.split(step["flags"]), "--max-length", str(step["max_length"])])
    again = json.loads(capsys.readouterr().out)
    assert again["fits"] and again["max_length"] >= step["max_length"]


@pytest.mark.parametrize(
    ("flags", "proposed"),
    [
        (
            "--loss full --tile none --attention sdpa --checkpoint attention-saved --engine ddp",
            ["tiled loss", "tiled MLP", "flash attention", "ZeRO-3", "Ulysses", "8-bit states"],
        ),
        ("--keep 0.5 --checkpoint layer --engine zero3", ["optimizer on the host", "Ulysses", "8-bit states"]),
        ("--checkpoint layer --chunk auto --loss full --engine ddp",
         ["tiled loss", "ZeRO-3", "Ulysses", "8-bit states"]),
    ],
)  # fmt: skip
def test_the_flags_of_a_proposal_set_what_it_changes(
    flags: str, proposed: list[str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []

    def plan(request: Request, _: int | None, like: Any = None) -> Any:
        asked.append(request)
        raise UserError("plan.no-layers", "no plan is needed")

    monkeypatch.setattr("seqtile.planner.memory_plan.plan", plan)
    command = ["plan", "--model", str(folder), "--device", "1.5GiB", "--gpus", "4", *flags.split()]
    assert main(command) == 2
    request = asked[0]
    found = [*chain(*proposals(SimpleNamespace(request=request, host_has_room=False)))]  # type: ignore[arg-type]
    assert [technique.name for technique in found] == proposed
    for technique in found:
        assert main([*command, *technique.flags_for(request).split()]) == 2
        assert replace(asked[-1], config=request.config) == technique.on(request) != request


@pytest.mark.parametrize("changes", [
    dict(offload=True), dict(offload="checkpoints+weights"), dict(checkpoint="none:1+attention-saved:2"),
    dict(checkpoint=None, keep=0.5, tile=512), dict(blocks="mlp+norm+projections", heads=1, tile=512, offload=True),
    dict(chunk="auto", segment=4),
])  # fmt: skip
def test_the_flags_of_other_settings_set_them(
    folder: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Request] = []

    def plan(request: Request, *_: Any, like: Any = None) -> Any:
        asked.append(request)
        raise UserError("plan.no-layers", "no plan is needed")

    monkeypatch.setattr("seqtile.planner.memory_plan.plan", plan)
    command = ["plan", "--model", str(folder), "--device", "1.5GiB", "--lora", "4", "--checkpoint", "layer"]
    main(command)
    given = asked[0].options
    target = Planner(changed(asked[0], **changes))
    main([*command, *shlex.split(explain_module._flags(target, given, 16384))])
    after = asked[-1].options
    assert str(after.tile) == str(changes.get("tile", "auto"))
    assert after == replace(target.request.options, tile=after.tile)


def test_offloaded_checkpoints_leave_all_but_those_in_flight(planner: Planner) -> None:
    on, off = terms(planner), terms(other(planner, offload=True))
    held = 4 * 16384 * 256 * 4  # layers, tokens, hidden, fp32 weights under autocast
    assert off.host_terms["checkpointed hidden states"] == held
    assert off.terms.get("checkpointed hidden states", 0.0) <= held / 4 * CONSTANTS["in flight"].expected
    assert off.device.expected < on.device.expected


# layers, bf16 output of [tokens, queries], fp32 log-sum-exp of [tokens, heads]
KEPT_BYTES = 4 * 16384 * (2 * 192 + 4 * 4)


def test_attention_is_saved_where_that_fits_and_pays(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "recipe.yaml"
    arguments = ["plan", "--model", str(folder), "--device", "4GiB", "--max-length", "16384", "--tile", "4096"]
    assert main([*arguments, "--json", "--recipe", str(written)]) == 0
    found = json.loads(capsys.readouterr().out)
    saved = found["attention_saved"]
    assert (found["checkpoint"], saved["chosen"]) == ("attention-saved", True)
    assert found["terms"]["device_gib"]["kept attention outputs"] == KEPT_BYTES / 2**30
    # no more than what is kept and its share of fragmentation; a recompute that runs no attention may hold less
    assert 0 < saved["more_gib"] <= 1.1 * KEPT_BYTES / 2**30
    assert saved["saves"] > WORTH
    assert found["peak_device_gib"]["high"] <= 4
    assert build_recipe(read_recipe(written), {"dataset": "rows.jsonl"})[0].options.checkpoint == "attention-saved"


def test_attention_is_not_saved_where_that_does_not_fit_or_pay(planner: Planner) -> None:
    longest, _ = planner.longest()
    for tokens, words in ((longest, "does not fit"), (16384, "not at the high one"), (256, "worth it from 3%")):
        chosen, saving = choose_attention_saved(planner, tokens)
        assert (chosen, saving.chosen) == (planner, False)
        assert words in saving.why
        assert recipe(chosen, tokens)["checkpoint"] == "layer"


def test_what_cannot_fit_is_refused_without_a_fake_run(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    small = other(planner, device=Device("tiny", 2**29, 10.0, "made up"))
    monkeypatch.setattr(Planner, "lines", None)
    _, saving = choose_attention_saved(small, 65536)
    assert "does not fit, at least" in saving.why
    assert saving.more == 4 * KEPT_BYTES


def test_no_fake_run_saves_attention_where_the_step_does_not_fit_without(
    planner: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither at the longest that fits, which the high estimate is beyond, nor at a length that is far too long."""
    request = changed(planner.request, checkpoint="auto", offload=True)  # outputs on the host: the device may have room
    request = replace(request, device=Device("smaller", 2**30, 10.0, "made up"))
    found: list[Setup] = []
    monkeypatch.setattr("seqtile.planner.memory_plan.fit_for", _Fits(found))
    for max_length in (None, 65_536):
        found.clear()
        one, estimate, _, _, saving = plan(request, max_length)
        assert saving is not None and not saving.chosen
        assert "not chosen: the high estimate does not fit even without it" in saving.why
        assert not one.fits_at_the_high_estimate(estimate)
        assert found and {setup.options.checkpoint for setup in found} == {"layer"}


class _Fits:
    """Stands in for the fake runs of a planner and notes their settings."""

    def __init__(self, found: list[Setup]) -> None:
        self.found = found

    def __call__(self, config: Any, setup: Setup, *rest: Any) -> Any:
        self.found.append(setup)
        return fit_for(config, setup, *rest)


@pytest.mark.parametrize("changes", [{}, {"lora": Lora(4)}, {"engine": "fsdp2", "gpus": 8}])
def test_the_bound_is_one(folder: Path, changes: dict[str, Any]) -> None:
    one = Planner(request_of(folder, **changes))
    assert one.at_least(4096) <= one.estimate(4096).device.low


@pytest.mark.parametrize("offload", [False, True])
def test_a_plan_by_layer_lies_between_those_of_its_policies(folder: Path, offload: bool) -> None:
    """In memory and time, on the device and the host; with the bytes that checkpoints of these layers keep."""
    request, tokens = request_of(folder, offload=offload, blocks="none"), 16384
    layers, (plain, saved) = SIZES["num_hidden_layers"], (1, 2)
    mixed = f"none:{plain}+attention-saved:{saved}"
    planners = {name: Planner(changed(request, checkpoint=name)) for name in ("layer", "attention-saved", mixed)}
    if not offload:
        planners["none"] = Planner(changed(request, checkpoint=None))
    estimates = {name: planner.estimate(tokens) for name, planner in planners.items()}
    device = {name: estimate.device.expected for name, estimate in estimates.items()}
    seconds = {name: planner.work(tokens).seconds(989.0, 1) for name, planner in planners.items()}
    kept = {name: estimate.host_terms if offload else estimate.terms for name, estimate in estimates.items()}
    least, (more, most) = device["layer"], (device[mixed], device.get("none", math.inf))
    assert least < more < most and seconds["layer"] > seconds[mixed]
    assert (
        kept[mixed][KEPT]
        == kept["attention-saved"][KEPT] * saved / layers
        == planners[mixed].attention_outputs(tokens, mixed)
    )
    if offload:
        assert kept[mixed][CHECKPOINTS] == kept["layer"][CHECKPOINTS] * (layers - plain) / layers
        assert planners[mixed].at_least(tokens) > planners["layer"].at_least(tokens)
    assert planners[mixed].at_least(tokens) <= estimates[mixed].device.low
    uniform = planners["none"].work(tokens) if not offload else planners["attention-saved"].work(tokens)
    assert uniform.attention < planners[mixed].work(tokens).attention < planners["layer"].work(tokens).attention


def test_the_first_layers_get_what_room_the_host_has(folder: Path) -> None:
    """As many whole checkpoints of the first layers as fit; those of the last ones are larger."""
    request = request_of(folder, offload=True, checkpoint="attention-saved:1")
    tokens, layers = 16384, SIZES["num_hidden_layers"]
    kept = Planner(request).estimate(tokens).host_terms
    each, larger = kept[CHECKPOINTS] / layers, kept[KEPT]
    room = (layers - 1) * each + larger / 2
    short = Planner(changed(request, offload=f"{int(room)}B")).estimate(tokens)
    assert short.moved == pytest.approx((layers - 1) * each / (layers * each + larger))


def test_counts_beyond_the_layers_are_refused(folder: Path) -> None:
    with refused("checkpoint.layer-count", "99 layers"):
        Planner(request_of(folder, checkpoint="none:99"))


def test_attention_that_cannot_be_saved_is_said(planner: Planner) -> None:
    _, saving = choose_attention_saved(other(planner, attention="eager"), 16384)
    assert not saving.chosen
    assert "attention kernel" in saving.why


def test_kept_tiles_are_counted_from_runs_that_keep_them(planner: Planner) -> None:
    request = changed(planner.request, checkpoint=None, tile=4096, keep=0.5)
    plain, kept, full = (Planner(changed(request, keep=keep)) for keep in (0.0, 0.5, 1.0))
    assert kept.resolved(5 * 4096).options.keep == 2 / 5  # rounded down
    tokens = 2 * 4096
    held = kept.estimate(tokens).terms["kept gate and up"]
    assert held == pytest.approx(4 * 4096 * 2 * 704 * 2, rel=0.02)  # layers, tokens, gate and up, bf16
    none, half, every = (planner.estimate(tokens).device.expected for planner in (plain, kept, full))
    assert none < half <= every - held  # without kept tiles the peak is in an MLP's backward, which makes them again
    assert recipe(kept, tokens)["keep"] == 0.5
    bytes_each = 4096 * 2 * 704 * 2
    by_bytes = Planner(changed(request, keep=f"memory:{4 * bytes_each}"))
    assert by_bytes.resolved(8 * 4096).options.keep == 1 / 8  # one tile in each of the four layers


def test_a_saved_attention_is_not_computed_again_and_goes_to_the_host(planner: Planner) -> None:
    saved = other(planner, checkpoint="attention-saved", offload=True)
    # forward, recompute and 2.5 for the backward; without the recompute
    assert saved.work(16384).attention / planner.work(16384).attention == pytest.approx(3.5 / 4.5)
    found = terms(saved)
    assert found.host_terms["kept attention outputs"] == KEPT_BYTES
    assert found.terms.get("kept attention outputs", 0.0) <= KEPT_BYTES / 4 * CONSTANTS["in flight"].expected
    assert any(line.startswith("attention-saved: ") for line in explain(saved, found))


@pytest.mark.parametrize(
    ("device", "fastest"), [("h100", "FlashAttention-3"), ("a100-80", "FlashAttention-2"), ("t4", ""), ("80GiB", "")]
)
def test_the_fastest_attention_is_named(device: str, fastest: str, planner: Planner) -> None:
    found = explain(other(planner, device=find_device(device)), terms(planner))
    said = [line for line in found if line.startswith("fastest attention on this device: ")]
    assert len(said) == bool(fastest)
    assert all(fastest in line for line in said)


def test_shards_divide_what_stands(sharded: Planner) -> None:
    weights = sharded.counts.weights
    found = terms(sharded).terms
    assert found["weights"] == 4 * weights / 8
    assert found["optimizer state"] == 8 * weights / 8
    zero3 = terms(other(sharded, engine="zero3")).terms
    assert zero3["weights"] == (4 + 2) * weights / 8
    host = terms(other(sharded, engine="zero3", engine_offload=("optimizer",)))
    assert host.terms["weights"] == 2 * weights / 8
    assert host.terms.get("optimizer state", 0.0) == 0
    assert host.host_terms["optimizer state"] == (8 + 4) * weights


def test_what_engines_keep_beside_their_shards(sharded: Planner) -> None:
    request, counts = sharded.request, sharded.counts
    trained, forward = counts.trained, Phase("MLP", 0, "forward")

    def held(phase: Phase = forward, **changes: Any) -> dict[str, float]:
        return on_device(replace(request, **changes), counts, {}, phase)

    assert held()["gradients"] == 0
    # FSDP2 reduces nothing before the last micro-batch; DeepSpeed has its partition from set-up on
    assert held(accumulation=2)["gradients"] == 2 * trained
    assert held(engine="zero3")["gradients"] == held(engine="zero3", accumulation=2)["gradients"] == 2 * trained / 8
    assert held(engine="zero2")["weights"] == 2 * counts.weights + 4 * trained / 8
    # its part of the batches before, and of the one that runs
    assert held(engine="zero2", accumulation=2)["gradients"] == 2 * 2 * trained / 8
    # the bucket, a flat bf16 copy of the partition, and its fp32 copy
    step = held(Phase("optimizer step"), engine="zero3")
    assert step["engine buffers"] == 2 * ZERO_BUCKET + (2 + 4) * trained / 8
    offloaded = held(Phase("optimizer step"), engine="zero3", engine_offload=("optimizer",))
    assert offloaded["engine buffers"] == 2 * ZERO_BUCKET


def test_gathered_weights_that_zero3_keeps(sharded: Planner) -> None:
    request, counts = replace(sharded.request, engine="zero3"), sharded.counts
    small = on_device(request, counts, {}, Phase("MLP", 0, "forward"))["engine buffers"]
    # a model below DeepSpeed's limits stays whole, twice while the flat buffer is there
    assert small - 2 * ZERO_BUCKET == 2 * 2 * counts.weights
    large = replace(counts, weights=70 * 10**9, layer=856 * 10**6, root=2 * 10**9)
    held = on_device(request, large, {}, Phase("MLP", 0, "forward"))["engine buffers"]
    assert held - 2 * ZERO_BUCKET == 2 * 10**9 + 2 * (50 * 10**6 + large.layer)
    # nothing is gathered ahead of a layer that is more than may be kept
    larger = replace(large, layer=3 * 10**9)
    held = on_device(request, larger, {}, Phase("MLP", 0, "forward"))["engine buffers"]
    assert held - 2 * ZERO_BUCKET == 2 * larger.layer


def test_gradients_of_engines_during_the_backward(sharded: Planner) -> None:
    trained, layer, largest = 8 * 10**9, 200 * 10**6, 50 * 10**6
    head = sharded.counts.vocabulary * sharded.counts.hidden
    counts = replace(sharded.counts, weights=trained, trained=trained, layer=layer, largest=largest, root=2 * head)

    def held(engine: str, phase: Phase, share: float = 0.25, **changes: Any) -> dict[str, float]:
        request = replace(sharded.request, engine=engine, **changes)
        return on_device(request, counts, {"gradients": 2.0 * share * trained}, phase)

    # ZeRO-2: a rank has the buffer of its whole part as soon as one of its gradients is reduced
    assert held("zero2", Phase("MLP", 31, "backward"), share=0.01)["gradients"] == 2 * trained / 8
    assert held("zero2", Phase("MLP", 31, "backward"), share=0.0)["gradients"] == 0
    # a bucket that belongs to one rank is reduced where it is, one of several ranks from a copy, and ZeRO-3's too
    bucket, on_its_way = 2 * ZERO_BUCKET, 2 * largest
    assert held("zero2", Phase("MLP", 31, "backward"))["engine buffers"] == bucket + on_its_way
    assert held("zero2", Phase("MLP", 31, "backward"), gpus=16)["engine buffers"] == 2 * bucket + on_its_way
    gathered = held("zero3", Phase("MLP", 31, "forward"))["engine buffers"] - bucket
    assert held("zero3", Phase("MLP", 31, "backward"))["engine buffers"] - gathered == 2 * bucket + on_its_way
    # FSDP2: the head's gradient stays whole, a layer's until it is reduced, and those of a tiled MLP are in its tile
    reduced = held("fsdp2", Phase("attention", 31, "backward"))
    assert reduced["gradients"] == 4 * (0.25 * trained - head) / 8
    assert reduced["engine buffers"] == 2 * (2 * layer + 2 * head) + 2 * layer + 2 * (layer + head)
    tiled = held("fsdp2", Phase("MLP", 31, "backward"))["engine buffers"]
    assert reduced["engine buffers"] - tiled == 2 * layer
    untiled = replace(sharded.request.options, blocks="none")
    assert held("fsdp2", Phase("MLP", 31, "backward"), options=untiled)["engine buffers"] == reduced["engine buffers"]
    assert held("fsdp2", Phase("head and loss", None, "forward"))["engine buffers"] == 2 * (layer + 2 * head)
    # between updates they are all there, and one at a time is added to them
    several = held("fsdp2", Phase("attention", 31, "backward"), accumulation=2)["engine buffers"]
    assert reduced["engine buffers"] - several == 2 * (layer + head - largest)


def test_offloaded_shards_are_not_on_the_device(sharded: Planner) -> None:
    moved = replace(sharded.request, engine_offload=("optimizer", "weights"))
    terms = {"gradients": 2.0 * sharded.counts.trained}
    held = on_device(moved, sharded.counts, terms, Phase("MLP", 0, "backward"))
    assert held["weights"] == held["gradients"] == held["optimizer state"] == 0


def test_whole_logits_leave_a_hole_in_the_allocator(planner: Planner) -> None:
    whole = changed(planner.request, loss=None, blocks="none")
    plan = Planner(whole, like=planner)
    logits = 2 * SIZES["vocab_size"] * 4096
    forward, backward = (Phase("head and loss", None, direction) for direction in ("forward", "backward"))
    assert plan._left_over(backward, 4096) == logits
    assert plan._left_over(forward, 4096) == planner._left_over(backward, 4096) == 0
    assert Planner(replace(whole, precision="float32"), like=planner)._left_over(backward, 4096) == 0


def test_pinned_memory_comes_in_chunks(planner: Planner) -> None:
    request = replace(planner.request, options=replace(planner.request.options, offload=True))
    held = {"checkpointed hidden states": 3 * 2**28 + 1.0}
    assert sum(on_host(request, planner.counts, held).values()) == 4 * 2**28
    assert sum(on_host(request, planner.counts, held, budget=2**30 - 2**27).values()) <= 2**30 - 2**27 + 1
    assert sum(on_host(replace(request, device_type="cpu"), planner.counts, held).values()) == 3 * 2**28 + 1


def test_the_recipe_is_of_the_length_that_fits_at_the_high_estimate(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", "--model", str(folder), "--device", "1.5GiB", "--checkpoint", "layer", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["recipe"]["max_length"] == found["sure_length"] < found["max_length"]


def test_host_memory_is_each_nodes(planner: Planner) -> None:
    sharding = {"engine": "zero3", "gpus": 16, "engine_offload": ("optimizer",)}
    one, two = (other(planner, **sharding, nodes=nodes).request for nodes in (1, 2))
    for name, held in on_host(one, planner.counts, {}).items():
        assert on_host(two, planner.counts, {})[name] == held / 2, name
    assert two.per_node == 8
    offloaded = replace(two, options=replace(two.options, offload=True))
    assert on_host(offloaded, planner.counts, {"checkpointed hidden states": 1.0})["checkpointed hidden states"] == 8


def test_the_users_kernels_and_targets_are_planned(folder: Path) -> None:
    config = read_config(str(folder))
    setup = Setup(options=replace(PLANNED, loss_tile=256, blocks="none", checkpoint=None))
    assert fake_step(config, replace(setup, liger=True), 512).peak < fake_step(config, setup, 512).peak
    assert recipe(Planner(request_of(folder, liger=True)), 4096)["trainer"] == {"use_liger_kernel": True}
    assert parse_lora("r=4,target_modules=q_proj+v_proj") == {"r": "4", "target_modules": ["q_proj", "v_proj"]}
    few = parse_adapters("r=4,target_modules=q_proj+v_proj")
    assert few.target_modules == ("q_proj", "v_proj")
    trained = Planner(request_of(folder, lora=few)).counts.trained
    assert trained == 4 * 4 * (256 + 192 + 256 + 96)  # layers, rank, in and out of queries and of values


def test_micro_batches_are_in_the_plan_and_its_recipe(planner: Planner) -> None:
    several = Planner(replace(planner.request, accumulation=4), like=planner)
    forward = {phase: terms for phase, terms in several.lines(4096).at(4096).items() if phase.direction == "forward"}
    assert {terms["gradients"] for terms in forward.values()} == {4 * planner.counts.trained}
    assert recipe(several, 4096)["gradient_accumulation"] == 4
    assert "gradient_accumulation" not in recipe(planner, 4096)


def test_ranks_that_share_a_sequence_hold_a_part_of_it(sharded: Planner) -> None:
    zero3 = other(sharded, engine="zero3")
    whole, parts = terms(zero3, 8192), terms(other(zero3, sp_size=4), 4 * 8192)
    # the same tokens on a rank; the exchange of heads takes more where attention runs
    assert parts.terms["checkpointed hidden states"] == pytest.approx(whole.terms["checkpointed hidden states"])
    assert parts.device.expected >= whole.device.expected
    request, counts = replace(sharded.request, sp_size=4), sharded.counts
    apart = on_device(request, counts, {"tokens": 8192.0}, Phase("attention", 0, "backward"))["engine buffers"]
    together = on_device(sharded.request, counts, {}, Phase("attention", 0, "backward"))["engine buffers"]
    # query and output of 4 heads, keys and values of 4 (two of them repeated), of 48 each, bf16
    assert apart - together == 2 * (2 * 4 + 2 * 4) * 48 * 8192
    apart, together = (
        on_device(one, counts, {"tokens": 8192.0}, Phase("attention", 0, "recompute"))["engine buffers"]
        for one in (request, sharded.request)
    )
    assert apart - together == 2 * (3 * 4 + 2 * 4) * 48 * 8192  # the output twice more
    # Behind attention its output stands as the product after it saved it, too.
    for part, more in (
        (Phase("rest of the model", None, "backward"), 1),
        (Phase("MLP", 0, "recompute"), 1),
        (Phase("head and loss", None, "backward"), 0),
    ):
        apart, together = (
            on_device(one, counts, {"tokens": 8192.0}, part)["engine buffers"] for one in (request, sharded.request)
        )
        assert apart - together == more * 2 * 4 * 48 * 8192, part


def test_four_bit_weights_are_a_quarter_of_sixteen(folder: Path) -> None:
    planner = Planner(request_of(folder, lora=Lora(4)))
    plain, packed = terms(planner), terms(other(planner, qlora=True))
    saved = plain.terms["weights"] - packed.terms["weights"]
    assert saved == pytest.approx(planner.counts.linears * 1.484, rel=0.001)


def test_ddp_holds_gradients_twice(planner: Planner) -> None:
    assert terms(other(planner, engine="ddp", gpus=2)).terms["engine buffers"] == 4 * planner.counts.trained


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_in_formulas_are_those_of_the_optimizer(name: str) -> None:
    weight = torch.nn.Parameter(torch.zeros(512, 1024))
    optimizer = make_optimizer(name, [weight])
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    kept = [
        one for value in optimizer.state[weight].values() for one in (value if isinstance(value, list) else [value])
    ]
    states = sum(one.numel() * one.element_size() for one in kept if isinstance(one, torch.Tensor) and one.numel() > 1)
    assert states / weight.numel() == pytest.approx(STATE_BYTES[name], abs=0.02)


@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["full", "adapters"])
@pytest.mark.parametrize("checkpoint", ["layer", "attention-saved", None, "none:1+attention-saved:1"])
def test_operations_are_those_that_are_counted(folder: Path, lora: Lora | None, checkpoint: str) -> None:
    """Attention's own kernel is not a matrix product, so that a short row is counted without it."""
    request = request_of(folder, lora=lora, checkpoint=checkpoint, blocks="none", precision="float32")
    built = build(request.config, changed(request.setup(), loss=None), "cpu")
    counts = count_weights(request.config, built.model)
    planner = Planner(request)
    ids = torch.zeros(1, 512, dtype=torch.long)
    with count_products() as products:
        built.model(input_ids=ids, labels=ids).loss.backward()
    assert counts == planner.counts
    # adapters' own products, of rank 4, are not in the formula
    assert planner.work(512).products == pytest.approx(products.flops, rel=0.04 if lora else 0.01)


def test_every_device_and_constant_has_a_source() -> None:
    assert {"h200", "h100", "a100-80", "a100-40", "rtx4090"} <= DEVICES.keys()
    assert all(device.source and device.memory > 2**33 for device in DEVICES.values())
    assert all(one.source and one.low <= one.expected <= one.high for one in CONSTANTS.values())


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("llama-1b", 1.24), ("llama-8b", 8.03), ("llama-70b", 70.6), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.5),
        ("qwen3.5-9b", 8.95),
    ],
)  # fmt: skip
def test_named_shapes_have_the_published_size(name: str, billions: float) -> None:
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if NAMED[name][0] not in CONFIG_MAPPING:
        with refused("model.config-unreadable"):
            read_config(name)
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read_config(name))
    model.tie_weights()  # Transformers 5.0 leaves weights on the meta device untied
    assert sum(weight.numel() for weight in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.005)
    assert name in NAMED


PYTORCH: dict[str, Any] = {"blocks": "none", "loss": None}
"""Norms, rotary embedding and loss in PyTorch's own operators; time does not tell a tiled MLP from another."""


@pytest.mark.parametrize(
    ("layers", "tokens", "changes", "measured"),
    [
        (4, 32_768, {"lora": Lora(16), **PYTORCH}, 0.854),
        (4, 32_768, {"lora": Lora(16), "checkpoint": "attention-saved", **PYTORCH}, 0.796),
        (4, 32_768, {"lora": Lora(16), "checkpoint": "attention-saved", "loss": None}, 0.742),
        (4, 32_768, {"lora": Lora(16), "checkpoint": "attention-saved"}, 0.652),
        (2, 32_768, {"lora": Lora(16), **PYTORCH}, 0.521),
        (4, 32_768, PYTORCH, 0.972),
        (4, 32_768, {"checkpoint": "attention-saved", **PYTORCH}, 0.906),
        (32, 131_072, {"lora": Lora(16), "loss": None}, 51.7),
    ],
)
def test_a_step_takes_the_seconds_that_an_h100_took(
    layers: int, tokens: int, changes: dict[str, Any], measured: float
) -> None:
    """One NVIDIA H100 80GB HBM3, torch 2.11, Llama-8B in bf16, one row; Liger's kernels where not PyTorch's."""
    config = read_config("llama-8b")
    config.num_hidden_layers = layers
    h100 = find_device("h100")
    planner = Planner(changed(Request("llama-8b", config, h100, precision="bfloat16"), **changes))
    assert h100.tflops is not None
    assert planner.work(tokens).seconds(h100.tflops, 1) == pytest.approx(measured, rel=0.1)
