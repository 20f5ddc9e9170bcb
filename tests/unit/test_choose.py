"""``--fit``: the fastest settings that fit, and what a run that is out of memory goes on with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import seqtile
import tiny_run
from refusals import command_refused, refused
from seqtile import UserError, fitting
from seqtile._errors import RunError
from seqtile.cli import main
from seqtile.options import WHOLE_LAYER, TilingOptions, checkpoint_of, layer_policies
from seqtile.planner import chooser as module
from seqtile.planner.accelerators import Device
from seqtile.planner.chooser import choose_settings, fixed_settings
from seqtile.planner.estimate import Bounds
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import CONSTANTS
from seqtile.planner.step_config import Lora
from seqtile.train import fit as fits
from seqtile.train import launch, run
from seqtile.train.recipe import Recipe, build_recipe, read_recipe, resolve
from seqtile.train.resume import resumed_recipe
from seqtile.train.retry import tighter
from tiny_models import build, tiny_config

GIB = 2**30
LAYERS, TOKENS, TILE = 8, 65536, 8192
LAYER_GIB = {"layer": 1.0, "attention-saved": 2.0, None: 9.0}
"""What a layer of a model that is made up keeps, and its recompute in seconds; a step takes 24 beside."""
AGAIN = {"layer": 1.0, "attention-saved": 0.4, None: 0.0}
WEIGHTS, KEPT = 12, 16
"""GiB of its frozen weights, and of gate and up in all tiles, which save two seconds."""


def takes(options: TilingOptions) -> float:
    """GiB of a step: 12 in a layer with all heads at once and tiles of 8,192 tokens, less in chunks."""
    policies = layer_policies(options.checkpoint, LAYERS)
    waiting = sum(LAYER_GIB[policy] for policy in policies if policy is None or not options.offload_room)
    waiting /= options.segment if options.chunk is not None else 1
    tile = options.tile if isinstance(options.tile, int) else TILE
    layer = 12 - 4 * (options.heads is not None) - (options.blocks == WHOLE_LAYER) - 8 * (1 - tile / TILE)
    layer = 3 if options.chunk is not None else layer
    return waiting + layer + KEPT * float(options.keep) + WEIGHTS * (not options.weights_on_host)


def lasts(options: TilingOptions) -> float:
    """Seconds of a step."""
    seconds = 24 + sum(AGAIN[policy] for policy in layer_policies(options.checkpoint, LAYERS)) - 2 * float(options.keep)
    slower = 0.005 * bool(options.offload_room) + 0.02 * options.weights_on_host + 0.03 * (options.heads is not None)
    slower += 0.01 * (options.blocks == WHOLE_LAYER) + 0.05 * (options.chunk is not None) + 0.01 * (options.segment > 1)
    slower += 0.2 * (isinstance(options.tile, int) and options.tile < TILE)
    return seconds * (1 + slower)


class Planned:
    """A planner of that model."""

    spread = 2.0

    def __init__(self, request: Any, tokens: int | None = None, like: Any = None) -> None:
        self.request = request
        hidden, inner = 8192, KEPT * GIB // (4 * LAYERS * TOKENS)
        self.counts = SimpleNamespace(layers=LAYERS, hidden=hidden, largest_product=hidden * inner)
        self.setup = SimpleNamespace(autocast=True, dtype=torch.bfloat16)
        self.built = SimpleNamespace(blocks=[SimpleNamespace(path="fused")], model=None)
        self.furthest = 2**20

    def share(self, other: Any) -> None: ...

    def local(self, tokens: int) -> int:
        return tokens

    def resolved(self, tokens: int) -> Any:
        return SimpleNamespace(options=TilingOptions(tile=TILE if tokens > TILE else "auto", loss_tile=2048))

    def seconds(self, tokens: int, moved: float = 1.0) -> float:
        return lasts(self.request.options)

    def attention_outputs(self, tokens: int) -> float:
        return float(LAYERS * GIB)

    def host_room(self) -> float | None:
        return None

    def at_least(self, tokens: int) -> float:
        return GIB * (WEIGHTS * (not self.request.options.weights_on_host) + 1)

    def estimate(self, tokens: int) -> Any:
        bytes_taken = takes(self.request.options)
        bounds = Bounds(*(GIB * (bytes_taken + more) for more in (-self.spread, 0, self.spread)))
        beside_tiles = GIB * takes(replace(self.request.options, tile=1)) - CONSTANTS["context"].expected
        terms = {"weights": beside_tiles}
        return SimpleNamespace(device=bounds, peak_at="head", square=False, moved=1.0, terms=terms)

    def fits(self, estimate: Any) -> bool:
        return bool(estimate.device.expected <= self.request.device.memory)

    def fits_at_the_high_estimate(self, estimate: Any) -> bool:
        return bool(estimate.device.high <= self.request.device.memory)

    def longest(self, start: int | None = None) -> tuple[int, str]:
        return (8192 if self.request.options.chunk else 4096), "device memory: logits"


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "folder" not in request.fixturenames:
        monkeypatch.setattr(module, "Planner", Planned)
        monkeypatch.setattr(module, "runs_on_some_heads", lambda _: True)
        monkeypatch.setattr(module, "can_carry", lambda _: False)
        monkeypatch.setattr(module, "count_work", lambda request, *_: SimpleNamespace(total=lasts(request.options)))
        monkeypatch.setattr(module, "step_seconds", lambda request, *_: lasts(request.options))


def settings(checkpoint: str | None = "layer", offload: Any = False, tile: Any = TILE, **rest: Any) -> TilingOptions:
    return TilingOptions(**{
        "checkpoint": checkpoint, "offload": offload, "tile": tile, "loss": "tiled", "loss_tile": 2048, **rest
    })  # fmt: skip


def ask(memory: float, tokens: int = TOKENS, given: Any = None, can_offload: bool = True, **rest: Any) -> Any:
    lora = rest.pop("lora", None)
    request = Request(model="m", config=None, device=Device("it", int(memory * GIB), None, ""), lora=lora)
    return choose_settings(request, tokens, given or {}, can_offload=can_offload, **rest)


def every_choice(lora: bool) -> Iterator[TilingOptions]:
    """All settings: of every layer one of three, gate and up in every number of tiles, on every frame."""
    minimal = {"blocks": WHOLE_LAYER, "heads": 1}
    for offload, weights, bound in itertools.product((False, True), (False, True)[: 1 + lora], ({}, minimal)):
        on_host = {(False, False): False, (True, False): True, (False, True): "weights"}.get(
            (offload, weights), "checkpoints+weights"
        )
        for saved, unchecked, kept in itertools.product(range(LAYERS + 1), range(LAYERS + 1), range(9)):
            if saved + unchecked <= LAYERS:
                policies = ["layer"] * (LAYERS - saved - unchecked) + ["attention-saved"] * saved + [None] * unchecked
                checkpoint = checkpoint_of(policies)
                if checkpoint is not None or not offload:
                    yield settings(checkpoint, on_host, keep=kept / 8, **bound)
    for segment, on_host in itertools.product((1, 4), (False, True, "weights", "checkpoints+weights")):
        frees_weights = on_host not in (False, True)
        if not frees_weights or (lora and segment == 1):
            yield settings("layer", on_host, chunk="auto", segment=segment)


@pytest.mark.parametrize("lora", [None, Lora(4)], ids=["all weights", "adapters"])
def test_the_choice_is_the_fastest_that_fits(lora: Lora | None) -> None:
    """Within two percent of a search through everything, at every size."""
    candidates = [
        (lasts(one), takes(one) + Planned.spread, one.heads is not None) for one in every_choice(lora is not None)
    ]
    for memory in range(18, 130, 3):
        found = ask(memory, lora=lora)
        fitting = [(seconds, minimal) for seconds, needed, minimal in candidates if needed <= memory]
        assert found.sure and takes(found.settings) + Planned.spread <= memory
        assert found.seconds == lasts(found.settings)
        # Minimal memory is slow to plan: it is looked at where it may save much, or nothing else fits.
        for beside, most in ((False, 1.02), (True, 1.02 / (1 - module.SLOW_GAIN))):
            best = min((seconds for seconds, minimal in fitting if minimal == beside), default=float("inf"))
            assert found.seconds <= most * best, (memory, found.settings)
        if all(minimal for _, minimal in fitting):
            assert found.seconds <= 1.02 * min(fitting, default=(float("inf"), True))[0]


@pytest.mark.parametrize(
    ("memory", "checkpoint", "offload", "tile", "heads"),
    [
        (128, None, False, TILE, None), (40, "attention-saved", True, TILE, None),
        (22, "attention-saved", True, TILE, 1), (18, "attention-saved", True, 2048, 1),
    ],
)  # fmt: skip
def test_some_choices(memory: float, checkpoint: str | None, offload: bool, tile: int, heads: int | None) -> None:
    found = ask(memory, given={"chunk": None}).settings
    assert (found.checkpoint, found.offload, found.tile, found.heads) == (checkpoint, offload, tile, heads)


def test_no_further_layer_or_tile_would_fit() -> None:
    """Where the host is out of reach, so that a layer's choice takes memory of the device."""
    for memory in range(36, 110):
        found = ask(memory, can_offload=False).settings
        policies = layer_policies(found.checkpoint, LAYERS)
        if found.chunk is None and None not in policies and "layer" in policies:
            more = checkpoint_of(["attention-saved" if policy == "layer" else policy for policy in policies][:1] +
                                 [*policies][1:])  # fmt: skip
            assert takes(replace(found, checkpoint=more)) + Planned.spread > memory


def test_the_last_layers_keep_what_the_first_do_not() -> None:
    found = ask(40, can_offload=False, given={"chunk": None, "heads": None, "blocks": "auto", "keep": 0.0}).settings
    policies = layer_policies(found.checkpoint, LAYERS)
    assert policies == tuple(sorted(policies, key=("layer", "attention-saved", None).index)) and len({*policies}) == 2


def test_the_reasons_name_every_choice_and_what_others_cost() -> None:
    found = ask(40)
    named = {"tile", "loss_tile", "checkpoint", "offload", "keep", "blocks", "heads"}
    assert found.reasons.keys() == named
    assert "26 s a step" in found.reasons["checkpoint"] and "layer would take" in found.reasons["checkpoint"]
    assert found == replace(ask(40), planner=found.planner, estimate=found.estimate)


def test_layers_that_are_checkpointed_whatever_is_chosen_stay_so() -> None:
    found = ask(200, checkpointed=True).settings
    assert (found.checkpoint, found.keep) == ("attention-saved", 1.0)


def test_what_only_the_expected_estimate_fits_is_taken_with_the_tiles_of_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planned, "spread", 60)
    found = ask(35)
    assert not found.sure and found.settings.tile == TILE


def test_nothing_that_fits_is_one_sentence_with_the_longest_of_all_settings() -> None:
    with pytest.raises(RunError, match=r"do not fit on it .* GiB of 10.00 GiB .*longest that fits is 8,192") as error:
        ask(10)
    assert error.value.planner.request.options.chunk == "auto"  # type: ignore[attr-defined]


def test_what_is_given_stays_and_says_so() -> None:
    found = ask(200, given={"checkpoint": "layer", "tile": 1024, "keep": 0.0})
    assert found.settings == settings("layer", False, 1024)
    assert {name for name, why in found.reasons.items() if why == "as given"} == {"checkpoint", "tile", "keep"}
    with pytest.raises(RunError, match="do not fit"):
        ask(30, given={"checkpoint": None})


@pytest.mark.parametrize("given", [{"heads": 1}, {"blocks": WHOLE_LAYER}, {"state": 512}, {"chunk": None}])
def test_no_chunks_beside_what_bounds_the_same(given: dict[str, Any]) -> None:
    assert ask(25, given=given).settings.chunk is None


def test_chunks_that_are_given_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_carry", lambda _: True)
    for memory in (200, 69, 34):
        found = ask(memory, given={"chunk": 4096}).settings
        assert (found.chunk, found.segment, found.state, found.heads) == (4096, 1, None, None)
        assert found.checkpoint == "layer"


@pytest.mark.parametrize(("memory", "can_offload", "offload"), [(26, False, False), (18, True, True)])
def test_chunks_keep_on_the_host_what_the_device_has_no_room_for(
    memory: float, can_offload: bool, offload: bool
) -> None:
    found = ask(memory, given={"tile": TILE}, can_offload=can_offload).settings
    assert (found.chunk, found.checkpoint, found.offload) == ("auto", "layer", offload)


def test_chunks_are_not_for_a_row_of_one() -> None:
    assert ask(25, tokens=8192, can_offload=False).settings.chunk is None


def test_frozen_weights_go_to_the_host_where_they_alone_do_not_fit() -> None:
    found = ask(14, lora=Lora(4))
    assert found.settings.weights_on_host and "frozen weights" in found.reasons["offload"]
    for kwargs in ({}, {"lora": Lora(4), "can_offload": False}):
        with pytest.raises(RunError):
            ask(10, **kwargs)


def test_settings_that_are_given_and_exclude_each_other_are_refused_in_a_sentence(folder: Path) -> None:
    config = CONFIG_MAPPING["llama"](hidden_size=64, intermediate_size=192, num_hidden_layers=6, num_attention_heads=4,
                                     num_key_value_heads=2, vocab_size=256, head_dim=16)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for given in ({"checkpoint": "attention-saved"}, {"checkpoint": "none:3"}):
        with refused("chunk.bounded-twice"):
            seqtile.fit(model, max_length=512, device="4GiB", chunk=128, **given)
    report = seqtile.fit(model, max_length=512, device="4GiB", keep="memory:1MiB", tile=128)
    assert report.settings["keep"] == "memory:1MiB" and "keep memory:1MiB: as given" in report.why


GIVEN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "nothing": ({}, {}),
    "tiles": ({"tile": "640", "loss_tile": 64}, {"tile": 640, "loss_tile": 64}),
    "attention saved": ({"checkpoint": "attention-saved", "offload": True}, None),
    "no blocks": ({"blocks": "none"}, {"blocks": "none", "tile": "auto", "keep": 0.0}),
    "a rule": ({"keep": "auto"}, {"keep": "auto"}),
}  # fmt: skip


@pytest.mark.parametrize("case", GIVEN)
def test_plan_fit_and_train_take_the_same_settings_as_given(case: str, folder: Path) -> None:
    given, expected = GIVEN[case]
    keys = {name: value for name, value in given.items() if name != "blocks"}
    recipe = recipe_of(folder, **keys, **{"tiled_mlp": False, "tile": None} if "blocks" in given else {})
    default = {"checkpoint": "auto", **given}
    assert fixed_settings(TilingOptions(**given)) == (given if expected is None else expected)
    assert fixed_settings(TilingOptions(**default), checkpoint="auto") == fixed_settings(TilingOptions(**given))
    assert fixed_settings(recipe.options, checkpoint="layer") == fixed_settings(TilingOptions(**given))


def test_checkpoints_that_are_switched_off_are_given() -> None:
    assert fixed_settings(TilingOptions(), checkpoint="layer") == {"checkpoint": None}
    assert fixed_settings(TilingOptions(), ["checkpoint", "vision"]) == {"checkpoint": None, "vision": None}
    assert fixed_settings(TilingOptions(offload=True), ["checkpoint"]) == {
        "offload": True
    }  # with checkpoints of layers


def test_what_depends_on_free_memory_is_not_replaced_by_a_choice(folder: Path) -> None:
    with pytest.raises(UserError) as error:
        fits.fit_recipe(recipe_of(folder, keep="auto", fit="4GiB"))
    assert error.value.code == "keep.auto-in-plan"


def test_a_host_of_unknown_memory_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def choose(*_: Any, can_offload: bool, **__: Any) -> Any:
        asked.append(can_offload)
        raise UserError("test.asked", "asked")

    monkeypatch.setattr(fitting, "choose_settings", choose)
    for memory in (None, GIB):
        request = Request(model="m", config=None, device=Device("it", GIB, None, ""), host_memory=memory)
        with pytest.raises(UserError, match="asked"):
            fitting.choose(request, TOKENS, {})
    assert asked == [False, True]


def test_no_rank_waits_for_one_that_raised(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the first rank ends with reaches the others, which plan nothing."""
    sent: list[Any] = []

    def broadcast(answer: list[Any]) -> None:
        answer[0] = sent[0] if sent else answer[0]
        sent.append(answer[0])

    for name, value in {"is_initialized": lambda: True, "broadcast_object_list": broadcast}.items():
        monkeypatch.setattr(fitting.distributed, name, value)
    planned: list[int] = []

    def fails() -> Any:
        planned.append(1)
        raise KeyError("of a model's own code")

    for rank, error in ((0, KeyError), (1, RunError)):
        monkeypatch.setattr(fitting.distributed, "get_rank", lambda rank=rank: rank)
        with pytest.raises(error, match="of a model's own code"):
            fitting._by_first_rank(fails)
    assert planned == [1]


def test_a_retry_leaves_weights_on_the_host() -> None:
    below = tighter(settings("layer", "weights", 128, loss_tile=128), can_offload=True)
    assert below is not None and below.offload == "checkpoints+weights"
    assert tighter(below, can_offload=True) is None


def test_without_an_accelerator_nothing_is_moved_to_the_host() -> None:
    assert not any(ask(memory, can_offload=False).settings.offload for memory in range(20, 100, 8))


def test_a_host_without_room_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is known: no base is planned there, and no longest row is looked for."""
    planned: list[Any] = []

    def estimate(self: Planned, tokens: int, original: Any = Planned.estimate) -> Any:
        planned.append(self.request.options.offload)
        return original(self, tokens)

    monkeypatch.setattr(Planned, "host_room", lambda self: 0.0)
    monkeypatch.setattr(Planned, "estimate", estimate)
    for memory in range(20, 100, 8):
        assert not ask(memory, lora=Lora(4), given={"chunk": None} if memory > 30 else None).settings.offload
    assert planned and not any(planned)


def test_smaller_tiles_are_not_planned_where_they_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[Any] = []

    def estimate(self: Planned, tokens: int, original: Any = Planned.estimate) -> Any:
        planned.append(self.request.options.tile)
        return original(self, tokens)

    monkeypatch.setattr(Planned, "estimate", estimate)
    given = {"chunk": None, "offload": False}
    assert ask(27, lora=Lora(4), given=given).settings.tile < TILE and min(planned) < TILE
    planned.clear()
    with pytest.raises(RunError):
        ask(18, lora=Lora(4), given=given)
    assert planned and min(planned) == TILE


def test_a_model_whose_attention_runs_whole_keeps_it_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "runs_on_some_heads", lambda _: False)
    assert all(ask(memory).settings.heads is None for memory in range(20, 100, 8))


def test_layers_with_a_state_run_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [ask(memory).settings for memory in (200, 40)]
    assert all(one.state is None for one in plain)
    monkeypatch.setattr(module, "can_carry", lambda _: True)
    found = [ask(memory) for memory in (200, 40)]
    assert [one.settings for one in found] == [replace(one, state="auto") for one in plain]
    assert all("one tile at a time" in one.reasons["state"] for one in found)
    assert ask(200, given={"state": None}).settings.state is None


def test_a_short_row_is_left_untiled() -> None:
    assert ask(200, tokens=4096).settings.tile == "auto"


def down(first: TilingOptions, can_offload: bool) -> Iterator[TilingOptions]:
    one: TilingOptions | None = first
    while (one := tighter(one, can_offload=can_offload) if one else None) is not None:
        yield one


def test_a_run_out_of_memory_goes_on_with_smaller_tiles_then_with_less_kept() -> None:
    chain = [*down(settings("none:2+attention-saved", keep=0.5), True)]
    assert chain == [
        settings("none:2+attention-saved", False, 2048, loss_tile=512),
        settings("none:2+attention-saved", False, 512, loss_tile=128),
        settings("none:2+attention-saved", False, 128, loss_tile=128), settings("layer", False, 128, loss_tile=128),
        settings("layer", True, 128, loss_tile=128),
    ]  # fmt: skip
    assert [*down(settings("layer", False, 128, loss_tile=64), False)] == []


# From here on the plan is real.

TINY = dict(max_length=64, tile="auto", steps=1)


def recipe_of(folder: Path, **values: Any) -> Recipe:
    paths = {"model": str(folder / "model"), "dataset": str(folder / "rows.jsonl"), "output": str(folder / "out")}
    return resolve(build_recipe({**TINY, **paths, **values}, {})[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("trl", reason="trl is not installed: it comes with seqtile[train]")
    folder = tmp_path_factory.mktemp("fit")
    tiny_run.save_model(folder / "model")
    tiny_run.write_jsonl(folder / "rows.jsonl", tiny_run.text_rows())
    return folder


def test_train_fit_says_why_saves_what_it_chose_and_a_resume_does_not_choose_again(folder: Path, capfd: Any):
    words = ["train", "--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--max-length", "64",
             "--steps", "1", "--output", str(folder / "out"), "--fit-memory", "1.5GiB"]  # fmt: skip
    assert main(words) == 0
    errors = capfd.readouterr().err
    assert "fit: 64 tokens per sequence on the memory given with 1.50 GiB: 0.75 GiB expected, 1.2" in errors
    for line in ("fit: tile auto: smaller tiles would not lower the peak", "fit: checkpoint none: ",
                 "fit: offload false: not needed", "fit: loss_tile 64: the rule of auto"):  # fmt: skip
        assert line in errors, errors
    saved = read_recipe(folder / "out" / "recipe.yaml")
    chosen = {key: saved[key] for key in ("fit", "tile", "checkpoint", "loss_tile", "keep")}
    assert chosen == {"fit": False, "tile": "auto", "checkpoint": "none",
                      "loss_tile": 64, "keep": 0.0}  # fmt: skip
    resumed, notes = resumed_recipe({}, {"output": str(folder / "out"), "fit": True, "steps": 2})
    assert not resumed.fit and notes == ["fit applies to new runs; --resume keeps the settings of this one"]
    assert not resumed.recomputes


def test_train_fit_of_a_hybrid_model_runs_its_state_in_tiles(folder: Path, tmp_path: Path, capfd: Any):
    """Gated DeltaNet and attention: the plan runs, the choice trains, and the saved recipe holds it."""
    if "qwen3_5_text" not in CONFIG_MAPPING:
        pytest.skip("of the installed transformers does not support activation")
    model = tmp_path / "model"
    config = tiny_config("qwen3_5_text")
    config.vocab_size, config.max_position_embeddings = tiny_run.save_tokenizer(model), 4096
    build(AutoModelForCausalLM, config).save_pretrained(model)
    words = ["train", "--model", str(model), "--dataset", str(folder / "rows.jsonl"), "--max-length", "64", "--steps",
             "1", "--output", str(tmp_path / "out"), "--fit-memory", "1.5GiB"]  # fmt: skip
    assert main(words) == 0
    errors = capfd.readouterr().err
    for line in ("fit: 64 tokens per sequence on the memory given with 1.50 GiB: ", "fit: checkpoint none: ",
                 "fit: state auto: layers with a state run one tile at a time",
                 "fit: 1 layer with a state (Gated DeltaNet) runs in transformers' PyTorch path",
                 "layers with a state in tiles of about 2,048 tokens: 1 of 1"):  # fmt: skip
        assert line in errors, errors
    saved = read_recipe(tmp_path / "out" / "recipe.yaml")
    assert {key: saved[key] for key in ("fit", "state", "checkpoint", "loss_tile")} == {
        "fit": False, "state": "auto", "checkpoint": "none", "loss_tile": 64
    }  # fmt: skip


def test_fit_refuses_before_anything_is_written(folder: Path, capsys: Any):
    words = ["train", "--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--max-length", "64",
             "--output", str(folder / "none")]  # fmt: skip
    (other := folder / "recipe.yaml").write_text("trainer: {save_only_model: true}")
    assert main([*words, "--fit-memory", "300MiB"]) == 1
    *before, error = capsys.readouterr().err.strip().splitlines()
    assert "do not fit on the memory given even with the tightest settings: 0." in error
    assert all(line.endswith(" ...") for line in before), before  # what it was at
    for more, code in (
        (["--fit-memory", "much"], "fit.malformed"),
        (["--on-oom", "pray"], "recipe.invalid-value"),
        (["--on-oom", "retry", "--tiled-mlp", "false"], "on-oom.retry-untiled"),
        (["--on-oom", "retry", "--recipe", str(other)], "on-oom.retry-with-trainer-key"),
    ):
        command_refused([*words, *more], code)
    assert not (folder / "none").exists()


def test_the_length_alone_chooses_where_there_is_an_accelerator(folder: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    plain = recipe_of(folder)
    assert plain.fit is None and run.fitted(plain, None, told.append) == plain and told == []  # none here
    monkeypatch.setattr(run, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(
        fits, "fit_recipe", lambda recipe, _: fits.Fitted(recipe.model_copy(update={"fit": False}), ("why",))
    )
    assert run.fitted(plain, None, told.append).fit is False and told == ["why"]
    assert run.fitted(recipe_of(folder, fit=False), None, told.append).fit is False and told == ["why"]
    assert run.fitted(plain, folder, told.append).fit is False and told == ["why"]  # a run that goes on

    demo = resolve(Recipe())
    assert run.fitted(demo, None, told.append) is demo and told == ["why"]
    for error in (UserError("plan.no-layers", "no plan"), RunError("no plan"), KeyError("no plan")):

        def nothing(recipe: Recipe, nodes: int, error: Exception = error) -> Any:
            raise error

        told.clear()
        monkeypatch.setattr(fits, "fit_recipe", nothing)
        assert run.fitted(plain, None, told.append) == plain.model_copy(update={"fit": False})
        assert len(told) == 1 and told[0].startswith("fit: settings are unchanged: ")
        with pytest.raises(type(error), match="no plan"):
            run.fitted(recipe_of(folder, fit=True), None, told.append)


def test_a_plan_is_asked_what_the_run_does(folder: Path):
    request = fits.request_of(recipe_of(folder, lora={"r": 4}, batch_size=3, optimizer="adamw-8bit"), GIB)
    found = {name: getattr(request, name) for name in ("batch", "optimizer", "attention")}
    assert found == {"batch": 3, "optimizer": "adamw-8bit", "attention": "sdpa"}
    assert request.options == TilingOptions(loss="tiled", loss_tile=4096, checkpoint="layer")
    assert request.lora and request.lora.r == 4 and request.device.memory == GIB and request.gpus == 1
    whole = fits.request_of(recipe_of(folder, tiled_mlp=False, tile=None, checkpoint="none"))
    assert (whole.options.tiled, whole.options.checkpoint) == (False, None) and whole.device.memory > GIB / 4
    kept = fits.request_of(recipe_of(folder, keep=0.5, tile="shards:2", checkpoint="attention-saved"))
    kept = kept.options
    assert (kept.keep, kept.tile, kept.checkpoint) == (0.5, "shards:2", "attention-saved")
    eight_bit = {"model_kwargs": {"quantization_config": {"load_in_8bit": True}}}
    for odd, code in (({"optimizer": "lomo"}, "optimizer.unknown"), (eight_bit, "fit.quantization-unsupported")):
        with refused(code):
            fits.request_of(recipe_of(folder, **odd), GIB)


def test_the_choice_is_made_once_before_the_processes_start(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    read: list[dict[str, Any]] = []

    def run_ranks(recipe: Any, *_: Any) -> int:
        read.append(recipe.model_dump())
        return 0

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    words = ["train", "--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--max-length", "64",
             "--output", str(tmp_path / "out"), "--engine", "ddp", "--nproc", "2", "--fit-memory", "4GiB"]  # fmt: skip
    assert main(words) == 0
    assert [(one["fit"], one["checkpoint"], one["loss_tile"]) for one in read] == [(False, "none", 64)]
    assert "fit: 64 tokens per sequence on 2 x the memory given with 4.00 GiB" in capfd.readouterr().err


def test_a_launcher_of_the_users_own_cannot_start_ranks_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    words = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--output", "out"]
    command = ["train", *words, "--engine", "ddp", "--on-oom", "retry"]
    command_refused(command, "on-oom.retry-under-launcher", "--engine ddp")
