"""``--fit``: the first settings of one order that fit, and what a run that is out of memory goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import tiny_run
from seqtile import UserError
from seqtile._errors import RunError
from seqtile.cli import main
from seqtile.options import TilingOptions
from seqtile.planner import ladder as module
from seqtile.planner.accelerators import Device
from seqtile.planner.estimate import Bounds
from seqtile.planner.ladder import LADDER, choose_rung, tighter
from seqtile.planner.request import Request
from seqtile.planner.step_config import Lora
from seqtile.train import fit as fits
from seqtile.train import launch, run
from seqtile.train.recipe import Recipe, build_recipe, read_recipe, resolve
from seqtile.train.resume import resumed_recipe
from tiny_models import build, tiny_config

GIB = 2**30
TAKES = {(None, False): 100, ("attention-saved", False): 60, ("layer", False): 40, ("attention-saved", True): 30,
         ("layer", True): 20}  # fmt: skip
"""GiB of a model that is made up; tiles take 8 more at 8,192 tokens, keep 10; all heads at once 4, whole norms 1."""
WEIGHTS = 12
"""GiB of its frozen weights, part of the others."""

MINIMAL_MEMORY = {"blocks": "mlp+norm+projections", "heads": 1}


class Planned:
    """A planner whose numbers can be read off :data:`TAKES`."""

    share_saved, spread, spared = 0.2, 2, 0

    def __init__(self, request: Any, tokens: int | None = None, like: Any = None) -> None:
        self.request, self.counts = request, None
        self.built = SimpleNamespace(blocks=[SimpleNamespace(path="fused")], model=None)

    def share(self, other: Any) -> None: ...

    def local(self, tokens: int) -> int:
        return tokens

    def resolved(self, tokens: int) -> Any:
        return SimpleNamespace(options=TilingOptions(tile=8192 if tokens > 8192 else "auto", loss_tile=2048))

    def work(self, tokens: int) -> Any:
        return SimpleNamespace(total=1.0)

    def estimate(self, tokens: int) -> Any:
        options = self.request.options
        tile = 8192 if options.tile == "auto" else options.tile
        takes = TAKES[options.checkpoint, bool(options.offload_room)] + tile / 1024 + 10 * options.keep
        takes -= WEIGHTS * options.weights_on_host
        takes -= 4 * (options.heads is not None) + (options.blocks != "auto")
        takes -= self.spared * options.segment * (options.chunk is not None)
        return SimpleNamespace(
            device=Bounds(*(GIB * (takes + more) for more in (-self.spread, 0, self.spread))),
            peak_at="head",
            square=False,
        )

    def fits(self, estimate: Any) -> bool:
        return bool(estimate.device.expected <= self.request.device.memory)

    def fits_at_the_high_estimate(self, estimate: Any) -> bool:
        return bool(estimate.device.high <= self.request.device.memory)

    def at_least(self, tokens: int) -> float:
        return GIB * (WEIGHTS + 1)

    def longest(self) -> tuple[int, str]:
        return 4096, "device memory: logits"


@pytest.fixture(autouse=True)
def _made_up(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    if "folder" not in request.fixturenames:
        monkeypatch.setattr(module, "Planner", Planned)
        monkeypatch.setattr(module, "runs_on_some_heads", lambda _: True)
        monkeypatch.setattr(module, "can_carry", lambda _: False)
        monkeypatch.setattr(module, "count_work", lambda *_: SimpleNamespace(total=1 - Planned.share_saved))


def settings(checkpoint: str | None, offload: bool, tile: int, loss_tile: Any, keep: float = 0.0, **rest: Any) -> Any:
    return TilingOptions(
        checkpoint=checkpoint, offload=offload, tile=tile, loss="tiled", loss_tile=loss_tile, keep=keep, **rest
    )


def ask(memory: float, tokens: int = 65536, given: Any = None, can_offload: bool = True, lora: Any = None) -> Any:
    request = Request(model="m", config=None, device=Device("it", int(memory * GIB), None, ""), lora=lora)
    return choose_rung(request, tokens, given or {}, can_offload=can_offload)


@pytest.mark.parametrize(
    ("memory", "checkpoint", "offload", "tile", "keep", "minimal_memory"),
    [
        (200, None, False, 8192, 1.0, False), (116, None, False, 8192, 0.5, False),
        (110, None, False, 8192, 0.0, False), (109, "attention-saved", False, 8192, 1.0, False),
        (69, "attention-saved", False, 8192, 0.0, True), (64, "layer", False, 8192, 1.0, False),
        (49, "layer", False, 8192, 0.0, True), (44, "attention-saved", True, 8192, 0.0, False),
        (39, "attention-saved", True, 8192, 0.0, True), (34, "layer", True, 8192, 0.0, False),
        (29, "layer", True, 8192, 0.0, True), (24, "layer", True, 2048, 0.0, True),
        (18, "layer", True, 512, 0.0, True),
    ],
)  # fmt: skip
def test_the_cheapest_that_fits(
    memory: float, checkpoint: str | None, offload: bool, tile: int, keep: float, minimal_memory: bool
) -> None:
    found = ask(memory)
    rest: dict[str, Any] = MINIMAL_MEMORY if minimal_memory else {}
    assert found.sure and found.settings == settings(checkpoint, offload, tile, found.settings.loss_tile, keep, **rest)
    named = {"tile", "loss_tile", "checkpoint", "offload", "keep", "blocks", "heads"}
    assert named >= found.reasons.keys() >= {"tile", "checkpoint", "heads"}
    assert found == replace(ask(memory), planner=found.planner, estimate=found.estimate)


def test_what_only_the_expected_estimate_fits_is_taken_with_the_tiles_of_auto(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Planned, "spread", 20)
    found = ask(35)
    assert not found.sure and found.settings == settings("layer", True, 8192, 2048, **MINIMAL_MEMORY)
    found = ask(17)
    assert not found.sure and found.settings.tile == 2048  # at 8,192 tokens it takes 23


def test_nothing_that_fits_is_one_sentence_with_the_longest_that_would():
    with pytest.raises(RunError, match=r"tightest settings: 15.50 GiB of 14.00 GiB .*longest that fits is 4,096"):
        ask(14)


def test_what_is_given_stays_and_says_so():
    found = ask(200, given={"checkpoint": "layer", "tile": 1024, "keep": 0.0})
    assert found.settings == settings("layer", False, 1024, 2048, 0.0)
    assert {name for name, why in found.reasons.items() if why == "as given"} == {"checkpoint", "tile", "keep"}
    with pytest.raises(RunError, match="do not fit"):
        ask(30, given={"checkpoint": None})


@pytest.mark.parametrize(
    ("memory", "checkpoint", "offload", "tile", "minimal_memory"),
    [
        (29, "layer", True, 8192, True),  # what fits with the weights on the device
        (24, "attention-saved", "checkpoints+weights", 8192, True), (22, "layer", "checkpoints+weights", 8192, False),
        (17, "layer", "checkpoints+weights", 8192, True), (12, "layer", "checkpoints+weights", 2048, True),
    ],
)  # fmt: skip
def test_frozen_weights_go_to_the_host_after_all_else(
    memory: float, checkpoint: str, offload: Any, tile: int, minimal_memory: bool
) -> None:
    found = ask(memory, lora=Lora(4))
    assert found.sure
    keep, rest = found.settings.keep, MINIMAL_MEMORY if minimal_memory else {}
    assert found.settings == settings(checkpoint, offload, tile, found.settings.loss_tile, keep, **rest)  # type: ignore[arg-type]
    assert ("weights" in str(offload)) == ("frozen weights" in found.reasons["offload"])


@pytest.mark.parametrize(
    ("memory", "segment", "offload"), [(49, None, False), (44, 1, False), (38, 4, False), (25, None, True)]
)
def test_chunks_come_before_the_host_and_four_layers_after_one(
    memory: float, segment: int | None, offload: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Planned, "spared", 6)
    monkeypatch.setattr(module, "can_carry", lambda _: True)  # tiles of states, which chunks take the place of
    found = ask(memory).settings
    assert found.offload == offload and found.chunk == (None if segment is None else "auto")
    if segment is not None:
        assert found == settings("layer", False, 8192, 2048, chunk="auto", segment=segment)
        assert {"chunk", "segment"} <= ask(memory).reasons.keys()
    assert ask(44, tokens=8192).settings.chunk is None  # a single chunk


@pytest.mark.parametrize("given", [{"heads": 1}, {"blocks": "mlp+norm+projections"}, {"state": 512}, {"chunk": None}])
def test_no_chunks_beside_what_bounds_the_same(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planned, "spared", 6)
    assert ask(36, given=given).settings.chunk is None


def test_chunks_that_are_given_stay_on_every_rung(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "can_carry", lambda _: True)
    for memory in (200, 69, 34):
        found = ask(memory, given={"chunk": 4096}).settings
        assert (found.chunk, found.segment, found.state, found.heads) == (4096, 1, None, None)
        assert found.checkpoint != "attention-saved"


def test_frozen_weights_go_to_the_host_first_where_they_alone_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planned, "at_least", lambda *_: 1000 * GIB)
    found = ask(200, lora=Lora(4))
    assert found.settings.weights_on_host and found.settings.checkpoint is None
    assert not ask(200).settings.offload  # every weight trains
    assert not ask(200, lora=Lora(4), can_offload=False).settings.offload


def test_a_retry_leaves_weights_on_the_host() -> None:
    below = tighter(settings("layer", "weights", 128, 128), can_offload=True)  # type: ignore[arg-type]
    assert below is not None and below.offload == "checkpoints+weights"
    assert tighter(below, can_offload=True) is None


def test_without_an_accelerator_nothing_is_moved_to_the_host():
    assert ask(38, can_offload=False).settings == settings("layer", False, 512, 128, 0.0, **MINIMAL_MEMORY)


def test_a_model_whose_attention_runs_whole_keeps_it_so(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "runs_on_some_heads", lambda _: False)
    found = ask(49, can_offload=False).settings
    assert found.heads is None and found.blocks == MINIMAL_MEMORY["blocks"]


def test_layers_with_a_state_run_in_tiles_on_every_rung(monkeypatch: pytest.MonkeyPatch):
    plain = [ask(memory).settings for memory in (200, 49)]
    assert all(one.state is None for one in plain)
    monkeypatch.setattr(module, "can_carry", lambda _: True)
    found = [ask(memory) for memory in (200, 49)]
    assert [one.settings for one in found] == [replace(one, state="auto") for one in plain]
    assert all("one tile at a time" in one.reasons["state"] for one in found)
    assert ask(200, given={"state": None}).settings.state is None


def test_a_short_row_is_left_untiled():
    assert ask(200, tokens=4096).settings.tile == "auto"


def down(first: TilingOptions, can_offload: bool) -> Iterator[TilingOptions]:
    one: TilingOptions | None = first
    while (one := tighter(one, can_offload=can_offload) if one else None) is not None:
        yield one


def test_a_run_out_of_memory_goes_on_with_smaller_tiles_then_with_what_the_ladder_has():
    chain = [*down(settings("attention-saved", False, 8192, 2048, 0.5), True)]
    assert chain == [
        settings("attention-saved", False, 2048, 512), settings("attention-saved", False, 512, 128),
        settings("attention-saved", False, 128, 128), settings("layer", False, 128, 128),
        settings("layer", True, 128, 128),
    ]  # fmt: skip
    assert [*down(settings("layer", False, 128, 64), False)] == []
    assert {(rung.checkpoint, rung.offload) for rung in LADDER} >= {(one.checkpoint, one.offload) for one in chain}


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
    for line in ("fit: tile auto: smaller tiles would not lower the peak", "fit: checkpoint none: no recompute",
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
    for more, said in (
        (["--fit-memory", "300MiB"], "do not fit on the memory given even with the tightest settings: 0."),
        (["--fit-memory", "much"], "got fit 'much', expected true, false or each device's memory"),
        (["--on-oom", "pray"], "recipe key 'on_oom': got 'pray'; input should be 'stop' or 'retry'"),
        (["--on-oom", "retry", "--tiled-mlp", "false"], "on_oom 'retry' lowers the tile size"),
        (
            ["--on-oom", "retry", "--recipe", str(other)],
            "on_oom 'retry' does not support",
        ),
    ):
        assert main([*words, *more]) == (1 if "do not fit" in said else 2)
        *before, error = capsys.readouterr().err.strip().splitlines()
        assert said in error and all(line.endswith(" ...") for line in before), error  # what it was at, and why not
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
    for error in (UserError, RunError, KeyError):

        def nothing(recipe: Recipe, nodes: int, error: type[Exception] = error) -> Any:
            raise error("supports no other quantization")

        told.clear()
        monkeypatch.setattr(fits, "fit_recipe", nothing)
        assert run.fitted(plain, None, told.append) == plain.model_copy(update={"fit": False})
        assert len(told) == 1 and told[0].startswith("fit: settings are unchanged: ")
        with pytest.raises(error, match="supports no other quantization"):
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
    for odd, said in (({"optimizer": "lomo"}, "optimizer 'lomo'"), (eight_bit, "other quantization")):
        with pytest.raises(UserError, match=said):
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


def test_a_launcher_of_the_users_own_cannot_start_ranks_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    words = ["--model", str(folder / "model"), "--dataset", str(folder / "rows.jsonl"), "--output", "out"]
    assert main(["train", *words, "--engine", "ddp", "--on-oom", "retry"]) == 2
    assert "use seqtile train --engine ddp, or drop it" in capsys.readouterr().err
