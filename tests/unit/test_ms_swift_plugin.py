"""The plugin for ms-swift against a stand-in, which tests/frameworks compares with what it stands for."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import swift_stand_in as swift
from refusals import refused
from seqtile.integrations import ms_swift

PLUGIN = str(ms_swift.PLUGIN)
ON = ["--use_tiled_mlp", "true"]


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    swift.install(monkeypatch)
    monkeypatch.delenv(ms_swift.VARIABLE, raising=False)


def rule(*argv: str, kind: type = swift.SftArguments) -> str | None:
    """The tile rule that a command line leads to, None if nothing is switched on."""
    arguments = swift.parse(kind, ["--external_plugins", PLUGIN, *argv])
    return swift.callbacks_map["seqtile"].keywords["tile"] if "seqtile" in arguments.callbacks else None


@pytest.mark.parametrize(("argv", "expected"), [
    ([], None), (["--use_tiled_mlp", "false", "--tiled_mlp_num_shards", "4"], None),
    (ON, "shards:4"), (["--use_tiled_mlp"], "shards:4"), (["--use_tiled_mlp=True"], "shards:4"),
    ([*ON, "--tiled_mlp_num_shards", "9"], "shards:9"), (["--callbacks", "seqtile"], "shards:4"),
    (["--callbacks", "other", "seqtile", *ON], "shards:4"),
])  # fmt: skip
def test_flags(argv: list[str], expected: str | None) -> None:
    assert rule(*argv) == expected


@pytest.mark.parametrize("argv", [[], ON, ["--callbacks", "seqtile"]])
def test_the_variable_takes_any_rule_and_switches_on(argv: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ms_swift.VARIABLE, "memory:1GiB")
    assert rule(*argv) == "memory:1GiB"


@pytest.mark.parametrize(("argv", "expected"), [
    (["--seqtile", '{"keep": 0.5}'], {"tile": "shards:4", "keep": 0.5}),
    (["--seqtile", '{"tile": 4096, "only": ["*.0.*"]}'], {"tile": 4096, "only": ["*.0.*"]}),
    ([*ON, "--tiled_mlp_num_shards", "9", "--seqtile", '{"blocks": "mlp"}'], {"tile": "shards:9", "blocks": "mlp"}),
])  # fmt: skip
def test_the_arguments_of_apply_are_given_as_json(argv: list[str], expected: dict[str, object]) -> None:
    arguments = swift.parse(swift.SftArguments, ["--external_plugins", PLUGIN, *argv])
    assert arguments.callbacks == ["seqtile"]
    made = swift.callbacks_map["seqtile"]
    assert made.keywords == expected
    made(SimpleNamespace(), SimpleNamespace())  # each value is one that the callback takes


def test_other_callbacks_stay_and_ours_is_added_once() -> None:
    argv = ["--external_plugins", PLUGIN, "--callbacks", "lisa", "seqtile", *ON]
    assert swift.parse(swift.SftArguments, argv).callbacks == ["lisa", "seqtile"]


def test_unknown_flags_are_still_refused() -> None:
    with pytest.raises(ValueError, match=r"remaining_argv: \['--use_tiled_mlpp', 'true'\]"):
        rule(*ON, "--use_tiled_mlpp", "true")


def test_a_version_with_the_flags_does_not_run_its_own() -> None:
    argv = ["--external_plugins", PLUGIN, *ON, "--tiled_mlp_num_shards", "8"]
    arguments = swift.parse(swift.TiledArguments, argv)
    assert not arguments.use_tiled_mlp and arguments.callbacks == ["seqtile"]
    assert swift.callbacks_map["seqtile"].keywords["tile"] == "shards:8"
    assert rule(*ON, kind=swift.TiledArguments) == "shards:4"
    assert rule(kind=swift.TiledArguments) is None


def test_inference_loads_the_plugin_and_knows_no_flag() -> None:
    swift.parse(swift.InferArguments, ["--external_plugins", PLUGIN])
    with pytest.raises(ValueError, match="remaining_argv"):
        swift.parse(swift.InferArguments, ["--external_plugins", PLUGIN, *ON])


def test_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swift.SftArguments, "__module__", "swift.megatron.arguments")
    assert rule() is None
    with refused("ms-swift.megatron"):
        rule(*ON)


@pytest.mark.parametrize(("argv", "variable", "refusal"), [
    (["--tiled_mlp_num_shards", "4"], None, ("ms-swift.shards-without-tiled-mlp",)),
    ([*ON, "--tiled_mlp_num_shards", "0"], None, ("option.malformed", "shards:0")),
    ([*ON, "--tiled_mlp_num_shards", "4"], "auto", ("tile.given-twice", "shards 4", "SEQTILE_TILE=auto")),
    (["--use_tiled_mlp", "false"], "auto", ("ms-swift.contradicting-switches", "SEQTILE_TILE=auto")),
    (["--use_tiled_mlp", "false", "--callbacks", "seqtile"], None, ("ms-swift.contradicting-switches", "--callbacks")),
    (["--use_tiled_mlp", "false", "--seqtile", '{"keep": 0.5}'], None, ("ms-swift.contradicting-switches",)),
    ([*ON, "--tiled_mlp_num_shards", "4", "--seqtile", '{"tile": 8}'], None, ("tile.given-twice", "--seqtile")),
    (["--seqtile", '{"tile": 8}'], "auto", ("tile.given-twice", "SEQTILE_TILE=auto", "--seqtile")),
    (["--seqtile", "keep"], None, ("ms-swift.not-json",)),
    (["--seqtile", "{}"], None, ("ms-swift.not-json",)),
    (["--seqtile", '{"kep": 1}'], None, ("option.unknown", "--seqtile", "'kep'", "keep?")),
    (["--seqtile", '{"keep": "lots"}'], None, ("option.malformed", "--seqtile", "keep='lots'")),
    (["--seqtile", '{"loss": "tiled"}'], None, ("framework.unverified-options", "--seqtile", "loss")),
    (["--seqtile", '{"blocks": "none"}'], None, ("ms-swift.tiles-nothing",)),
    ([], "a lot", ("option.malformed", "'a lot'")),
])  # fmt: skip
def test_conflicts(
    argv: list[str], variable: str | None, refusal: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        monkeypatch.setenv(ms_swift.VARIABLE, variable)
    with refused(*refusal):
        rule(*argv)


@pytest.mark.parametrize("argv", [["--use_tiled_mlp", "maybe"], [*ON, "--tiled_mlp_num_shards", "four"]])
def test_values_of_flags_are_read_as_ms_swift_reads_its_own(argv: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        rule(*argv)
    assert argv[-1] in capsys.readouterr().err


def test_the_callback_is_made_as_ms_swift_makes_its_own() -> None:
    rule(*ON)
    callback = swift.callbacks_map["seqtile"](SimpleNamespace(), SimpleNamespace())
    from seqtile import TilingCallback

    assert isinstance(callback, TilingCallback)


def test_a_process_whose_checkpoints_ms_swift_has_replaced_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.utils.checkpoint

    rule(*ON)
    former = torch.utils.checkpoint.checkpoint
    monkeypatch.setattr(torch.utils.checkpoint, "_old_checkpoint", former, raising=False)
    swift.callbacks_map["seqtile"](None, None)  # ours was loaded before
    monkeypatch.setattr("seqtile.ops.tile_checkpoint.checkpoint", lambda *_, **__: None)
    with refused("ms-swift.trained-before"):
        swift.callbacks_map["seqtile"](None, None)


def test_the_plugin_file_is_found_and_lies_alone() -> None:
    said = subprocess.run([sys.executable, "-m", "seqtile.integrations.ms_swift"], capture_output=True, text=True)
    assert (said.returncode, said.stdout.strip()) == (0, PLUGIN), said.stderr
    # ms-swift puts the folder first on sys.path: a module beside it would hide one of the same name, as unsloth.
    assert [file.name for file in Path(PLUGIN).parent.glob("*.py")] == ["seqtile_plugin.py"]
