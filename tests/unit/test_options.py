"""One set of options: declared once, found everywhere, and the same on the way from one place to the next."""

from __future__ import annotations

import ast
import inspect
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import seqtile
from refusals import command_refused, refused
from seqtile.cli import main
from seqtile.cli.flags import flag, option_flags, takes
from seqtile.install.apply import apply_options
from seqtile.options import DEFAULTS, WHOLE_LAYER, WRITTEN, TilingOptions, checkpoint_of, layer_policies
from seqtile.planner import memory_plan
from seqtile.planner.explain import recipe as recipe_of_plan
from seqtile.planner.request import Request
from seqtile.train.fit import settings_of
from seqtile.train.recipe import (
    OptionKeys,
    build_recipe,
    keys_of,
    options_of_keys,
    read_recipe,
    recipe_keys,
    resolve,
    save_recipe,
)
from seqtile.train.resume import resumed_recipe

SOURCE = Path(seqtile.__file__).parent
GIVEN = {"model": "m", "dataset": "d.jsonl"}

ONE_MORE = """
import contextlib, io, json, re, sys, types
from pathlib import Path
import seqtile
from types import SimpleNamespace

text = Path(sys.argv[1]).read_text(encoding="utf-8")
before = "    def __post_init__(self)"
assert text.count(before) == 1
module = sys.modules["seqtile.options"] = seqtile.options = types.ModuleType("seqtile.options")
exec(compile(text.replace(before, sys.argv[2] + "\\n" + before), "options.py", "exec"), module.__dict__)

from seqtile.cli import main, train_command
from seqtile.train import recipe as recipes

found = {}
for command in ("train", "plan", "verify"):
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([command, "--help-all" if command == "train" else "--help"]) == 0
    found[f"{command} --help"] = "--dummy" in said.getvalue()
recipe, _ = recipes.build_recipe({"model": "m", "dataset": "d", "dummy": 5}, {})
found["recipe"] = [recipe.options.dummy, recipe.model_dump()["dummy"], recipe.changed(dummy=6).options.dummy]
found["apply"] = recipe.tiling.dummy
found["resumed"] = recipe == recipes.build_recipe(recipe.model_dump(), {})[0]
try:
    recipes.build_recipe({"dummy": "many"}, {})
except ValueError as error:
    found["refused"] = str(error)

from seqtile.planner import explain, memory_plan
from seqtile.train import fit
from seqtile.train import resume

found["a plan of the recipe"] = fit.settings_of(recipe).dummy

def plan(request, max_length, like=None):
    found["ladder"] = laddered(request)
    found["request"], found["step"] = request.options.dummy, request.setup().options.dummy
    planner = SimpleNamespace(request=request, resolved=lambda tokens: request.setup())
    found["the recipe of a plan"] = explain.recipe(planner, 4096)["dummy"]
    raise SystemExit

from seqtile.train.retry import tighter
from seqtile.planner.techniques import ABLATION

def laddered(request):
    for technique in ABLATION:
        request = technique.on(request)
    return [request.options.dummy, tighter(request.options, can_offload=True).dummy]

sys.path += [sys.argv[3], str(Path(sys.argv[3]).with_name("benchmarks"))]
from cell import Cell

cell = Cell(8, 16, 4, options=module.TilingOptions(dummy=5)).row()
found["a benchmark"] = [cell["dummy"], Cell.of(cell).options.dummy]

from seqtile.integrations import ms_swift

rest = ["--seqtile", '{"dummy": 5}']
try:
    ms_swift.settings(SimpleNamespace(callbacks=[]), rest, None)
except ValueError as error:
    found["ms-swift"] = str(error).partition(",")[0]

import axolotl_standin, pytest

axolotl_standin.install(pytest.MonkeyPatch())
from seqtile.integrations import axolotl

section = axolotl.SeqtileSettings(dummy=5).model_dump()
found["axolotl"] = axolotl.apply_arguments({"seqtile": section})

memory_plan.plan = plan
main(["plan", "--model", "llama-8b", "--dummy", "7"])

def build(values, flags):
    found["train"] = flags["dummy"]
    raise SystemExit

train_command.build_recipe = build
main(["train", "--dummy", "9"])
print(json.dumps(found))
"""


def test_a_new_option_is_one_line() -> None:
    """The line is put into the source of ``seqtile.options``, in a fresh interpreter."""
    line = '    dummy: int = option(3, "A dummy")\n'
    command = [sys.executable, "-c", ONE_MORE, str(SOURCE / "options.py"), line, str(Path(__file__).parents[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "train --help": True, "plan --help": True, "verify --help": False,
        "recipe": [5, 5, 6], "apply": 5, "resumed": True, "a plan of the recipe": 5, "request": 7, "step": 7,
        "the recipe of a plan": 7, "train": 9,
        "ladder": [7, 7], "a benchmark": [5, 5], "axolotl": {"dummy": 5},
        "ms-swift": "--seqtile: dummy: not verified with ms-swift's trainer",
        "refused": "recipe key 'dummy': got 'many'; "
        "input should be a valid integer, unable to parse string as an integer",
    }  # fmt: skip


def test_the_arguments_of_apply_are_the_options() -> None:
    arguments = inspect.signature(seqtile.apply).parameters.values()
    assert {one.name: one.default for one in arguments if one.kind is one.KEYWORD_ONLY} == DEFAULTS
    documented = re.findall(r"^        (\w+): ", inspect.getdoc(seqtile.apply) or "", re.M)
    documented = documented or re.findall(r"^    (\w+): ", inspect.getdoc(seqtile.apply) or "", re.M)
    assert documented[: len(DEFAULTS) + 1] == ["model", *DEFAULTS]


ELSEWHERE = {"TilingOptions", "apply", "tile_module", "Report"}
"""The record, the two public functions, and what was done, in words."""


def declared(node: ast.AST) -> set[str]:
    """Fields of a class, parameters of a function."""
    if isinstance(node, ast.ClassDef):
        fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
        return {field.id for field in fields if isinstance(field, ast.Name)}
    if isinstance(node, ast.FunctionDef):
        return {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
    return set()


def test_nothing_else_declares_the_options() -> None:
    """No other class or function has three of their names among its fields or parameters."""
    found = {
        getattr(node, "name", "")
        for file in sorted(SOURCE.rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if len(declared(node) & DEFAULTS.keys()) > 2
    }
    assert {"TilingOptions", "apply"} < found
    assert found <= ELSEWHERE


SOME = [
    TilingOptions(), TilingOptions(tile=4096, keep=0.5, heads=1), TilingOptions(tile="memory:1GiB", keep="memory:4GiB"),
    TilingOptions(blocks=WHOLE_LAYER, only=("*.0.*",), trust="a.b"), TilingOptions(blocks="none", offload=True),
    TilingOptions(loss="tiled", loss_tile=512, checkpoint="layer"),
    TilingOptions(checkpoint="attention-saved", offload="64GiB", heads="auto"),
    TilingOptions(checkpoint="none:4+attention-saved:20"),
]  # fmt: skip


@pytest.mark.parametrize("options", SOME, ids=str)
def test_a_recipe_gives_back_the_options_that_it_is_written_from(options: TilingOptions, tmp_path: Path) -> None:
    assert options_of_keys(OptionKeys(**keys_of(options))) == options
    recipe, _ = build_recipe({**GIVEN, **keys_of(options)}, {})
    assert recipe.options == options
    save_recipe(recipe, tmp_path / "recipe.yaml")
    assert build_recipe(read_recipe(tmp_path / "recipe.yaml"), {})[0] == recipe
    assert recipe.changed(steps=3).options == options and recipe.changed(heads=2).options == replace(options, heads=2)


def test_every_key_is_an_option_once() -> None:
    assert len({*recipe_keys()}) == len(recipe_keys())
    assert {*keys_of(TilingOptions())} == {name for name, how in WRITTEN.items() if how.recipe} | {"tiled_mlp"}


UNTILED, TILED = (TilingOptions(blocks=blocks, checkpoint="layer") for blocks in ("none", "auto"))


def test_untiled_in_a_recipe_is_the_blocks_of_apply() -> None:
    for values in ({"tiled_mlp": False}, {"blocks": "none"}, {"use_tiled_mlp": "no"}):
        recipe, _ = build_recipe({**GIVEN, **values}, {})
        assert recipe.options == UNTILED and not recipe.tiled_mlp and recipe.model_dump()["tiled_mlp"] is False
        assert build_recipe(recipe.model_dump(), {"tiled_mlp": "true"})[0].options == TILED
    with refused("tile.contradicting-switches", "'tiled_mlp: True'", "'blocks: none'"):
        build_recipe({**GIVEN, "tiled_mlp": True, "blocks": "none"}, {})


def test_an_untiled_run_may_go_on_tiled(tmp_path: Path) -> None:
    recipe, _ = build_recipe({**GIVEN, "tiled_mlp": False}, {})
    save_recipe(resolve(recipe), tmp_path / "recipe.yaml")
    for given, options in (
        ({}, UNTILED),
        ({"tile": "64"}, replace(TILED, tile="64")),
        ({"tiled_mlp": "true"}, TILED),
    ):
        assert resumed_recipe({}, {"output": str(tmp_path), **given})[0].options == options


PLANNED = TilingOptions(loss="tiled", checkpoint="auto")


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """The requests that ``seqtile plan`` makes, in the place of their plans."""
    asked: list[Request] = []

    def plan(request: Request, max_length: int | None, like: Any = None) -> None:
        asked.append(request)
        raise SystemExit(0)

    monkeypatch.setattr(memory_plan, "plan", plan)
    return asked


FLAGS = {
    "": PLANNED,
    "--tile 4096 --keep 0.5": replace(PLANNED, tile="4096", keep=0.5),
    "--tile none --loss full": replace(PLANNED, blocks="none", loss=None),
    "--checkpoint layer --offload checkpoints": replace(PLANNED, checkpoint="layer", offload=True),
    "--checkpoint layer --offload checkpoints,weights --lora r=4": replace(
        PLANNED, checkpoint="layer", offload="checkpoints+weights"
    ),
    "--checkpoint layer --blocks mlp": replace(PLANNED, checkpoint="layer", blocks="mlp"),
    "--checkpoint none:4+attention-saved --loss tiled": replace(PLANNED, checkpoint="none:4+attention-saved"),
    "--checkpoint none --keep memory:4GiB": replace(PLANNED, checkpoint=None, keep="memory:4GiB"),
    f"--checkpoint attention-saved --blocks {WHOLE_LAYER} --heads 2": replace(
        PLANNED, checkpoint="attention-saved", blocks=WHOLE_LAYER, heads=2
    ),
}


@pytest.mark.parametrize("flags", FLAGS)
def test_flags_become_a_request_whose_recipe_is_planned_the_same(flags: str, planned: list[Request]) -> None:
    assert main(["plan", "--model", "llama-8b", *flags.split()]) == 0
    [request] = planned
    assert request.options == FLAGS[flags]
    if request.options.checkpoint == "auto":  # decided by the plan
        request = replace(request, options=replace(request.options, checkpoint="layer"))
    planner = SimpleNamespace(
        request=request, resolved=lambda _: request.setup(), estimate=lambda _: SimpleNamespace(moved=1.0),
        host_room=lambda: None,
    )  # fmt: skip
    again, _ = build_recipe(recipe_of_plan(planner, 4096), {"dataset": "d.jsonl"})  # type: ignore[arg-type]
    tile = request.options.tile
    expected = replace(request.options, loss="tiled", loss_tile=4096, tile=int(tile) if str(tile).isdigit() else tile)
    assert settings_of(again) == expected


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ("plan --tile wide", ("option.malformed", "tile='wide'")),
        ("plan --tile 0", ("option.malformed", "tile=0")),
        ("plan --checkpoint some", ("option.unknown-choice", "checkpoint 'some'", "attention-saved")),
        ("plan --checkpoint some:2", ("checkpoint.malformed", "'some:2'")),
        ("plan --blocks mlp --tile none", ("blocks.with-tile-none",)),
        ("plan --keep 0.5 --tile none", ("blocks.none-with-options", "so keep would")),
    ],
)
def test_a_bad_value_is_one_sentence(words: str, refusal: tuple[str, ...], tmp_path: Path) -> None:
    command, *flags = words.split()
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llama"}')
    command_refused([command, "--model", str(config), *flags], *refusal)


@pytest.mark.parametrize(
    ("values", "refusal"),
    [
        ({"tile": 1.5}, ("option.malformed", "tile=1.5", "float")),
        ({"keep": True}, ("option.malformed", "keep=True", "bool")),
        ({"blocks": "all"}, ("option.unknown-choice", "blocks='all'", "'mlp+norm'")),
        ({"path": "best"}, ("option.unknown-choice", "path='best'", "'fused'")),
        ({"loss": "full"}, ("option.unknown-choice", "loss='full'", "'tiled'")),
        ({"loss_tile": 0}, ("option.malformed", "loss_tile=0")),
        ({"loss_impl": "best"}, ("option.unknown-choice", "loss_impl='best'", "'native'")),
        ({"checkpoint": "full"}, ("checkpoint.malformed", "checkpoint='full'", "'attention-saved'")),
        ({"offload": "all"}, ("offload.malformed", "offload='all'")),
        ({"offload": "64GB+32GB"}, ("offload.malformed", "'64GB+32GB'")),
        ({"heads": 0}, ("option.not-a-count", "heads=0")),
    ],
    ids=str,
)
def test_a_value_is_checked_where_the_record_is_made(values: dict[str, Any], refusal: tuple[str, ...]) -> None:
    with refused(*refusal):
        TilingOptions(**values)


@pytest.mark.parametrize(
    ("written", "normal", "policies"),
    [
        ("layer", "layer", ["layer", "layer", "layer"]),
        ("none", None, [None, None, None]),
        ("attention-saved:2", "attention-saved:2", ["layer", "attention-saved", "attention-saved"]),
        ("none:1+attention-saved", "none:1+attention-saved", ["attention-saved", "attention-saved", None]),
        (" none:1 + attention-saved:9 ", "none:1+attention-saved:9", ["attention-saved", "attention-saved", None]),
        ("layer:1+none:1+layer", "layer:1+none:1", ["layer", None, "layer"]),
        ("layer:2", "layer", ["layer", "layer", "layer"]),
        ("none:0", "layer", ["layer", "layer", "layer"]),
        ("none:1+none:1", "none:2", ["layer", None, None]),
        ("none:1+none", None, [None, None, None]),
    ],
)
def test_checkpoints_by_layer(written: str, normal: str | None, policies: list[str | None]) -> None:
    options = TilingOptions(checkpoint=written)
    assert options == TilingOptions(checkpoint=normal) and options.checkpoint == normal
    assert [*layer_policies(options.checkpoint, 3)] == policies == [*layer_policies(checkpoint_of(policies), 3)]
    assert options.saves_attention == ("attention-saved" in policies)
    assert options.by_layer or len({*policies}) == 1


@pytest.mark.parametrize("written", ["none+layer", "none:", "none:-1", "layer:x", "+", "", "auto:1", ["layer"], 3])
def test_checkpoints_by_layer_that_cannot_be_read(written: Any) -> None:
    with refused("checkpoint.malformed"):
        TilingOptions(checkpoint=written)


def test_a_choice_of_the_plan_is_none_for_a_model() -> None:
    from torch import nn

    with refused("checkpoint.auto-outside-plan"):
        apply_options(nn.Linear(2, 2), TilingOptions(checkpoint="auto"))


def test_records_are_values() -> None:
    assert TilingOptions(only=["a", "b"]) == TilingOptions(only=("a", "b"))
    assert len({TilingOptions(only=["a"]), TilingOptions(only=("a",)), TilingOptions()}) == 2
    options = TilingOptions(tile=8, only="a", keep=0.5, path="generic", heads=1)
    assert options.without_blocks() == TilingOptions(blocks="none", heads=1)
    assert options.for_plan() == TilingOptions(tile=8, keep=0.5, heads=1)


def test_flags_come_where_the_command_has_its_options() -> None:
    @dataclass
    class Flags:
        first: int = flag(1, "First")
        options: dict[str, Any] = field(default_factory=dict)
        last: int = flag(2, "Last")

    received: list[Flags] = []
    command = takes(Flags, options=option_flags("plan", suffixes={"tile": ", or none"}))(received.append)
    names = [*inspect.signature(command).parameters]
    flags = [name for name, how in WRITTEN.items() if "plan" in how.commands]
    command(first=3, last=4, **{**dict.fromkeys(flags), "tile": "8"})
    assert received == [Flags(3, {"tile": "8"}, 4)]
    assert names == ["first", *flags, "last"] and {"tile", "keep", "checkpoint"} <= {*flags}
    assert inspect.signature(command).parameters["tile"].default.help.endswith("memory:1GiB, or none.")
