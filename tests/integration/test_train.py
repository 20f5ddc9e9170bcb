"""``seqtile train`` end to end on a tiny model: what it trains on, what it leaves behind, how it continues."""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback

import seqtile
import tiny_run
from refusals import command_refused, refused
from seqtile.cli import main
from seqtile.train.callbacks import StopOnSignal
from seqtile.train.data import load_rows
from seqtile.train.recipe import build_recipe, read_recipe
from seqtile.train.result_report import Outcome
from seqtile.train.run import train
from seqtile.train.run_directory import check_unlocked, why_not_whole

EXAMPLES = Path(__file__).parents[2] / "examples" / "recipes"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.write_jsonl(tmp_path_factory.mktemp("data") / "rows.jsonl", tiny_run.text_rows())


def run(model: Path, dataset: Path, output: Path, *, flags: Any = (), **values: Any) -> Outcome:
    """Train through the library with small defaults."""
    callbacks = values.pop("callbacks", ())
    how = {key: values.pop(key) for key in ("resume", "overwrite") if key in values}
    defaults = dict(max_length=tiny_run.LENGTH, tile=16, steps=5, learning_rate=1e-2, report=False)
    given = {**defaults, "model": str(model), "dataset": str(dataset), "output": str(output), **values}
    return train(build_recipe(given, dict(flags))[0], callbacks=callbacks, **how)


def arguments(model: Path, dataset: Path, output: Path, *more: str) -> list[str]:
    return ["train", "--model", str(model), "--dataset", str(dataset), "--max-length", str(tiny_run.LENGTH),
            "--output", str(output), "--steps", "5", *more]  # fmt: skip


def weights(output: Path) -> dict[str, torch.Tensor]:
    return load_file(next(output.glob("*model.safetensors")))


class SignalAt(TrainerCallback):
    """Send this process a signal while step ``step`` runs."""

    def __init__(self, step: int, number: signal.Signals = signal.SIGINT) -> None:
        self.step, self.number = step, number

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


class StepsRun(TrainerCallback):
    """Remember which steps were trained."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.steps.append(state.global_step)


def test_five_steps_give_a_model_that_plain_transformers_loads(model: Path, dataset: Path, tmp_path: Path, capsys):
    output = tmp_path / "out"
    assert main(arguments(model, dataset, output, "--tile", "16", "--learning-rate", "1e-2")) == 0
    shown = capsys.readouterr()
    assert "tiled 2 of 2 MLPs (LlamaMLP), 16 tokens per tile" in shown.err
    assert str(output) in shown.out and "step 5/5" in shown.out

    trained = AutoModelForCausalLM.from_pretrained(output)
    tokenizer = AutoTokenizer.from_pretrained(output)
    generated = trained.generate(**tokenizer("the cat", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert generated.shape[1] > len(tokenizer("the cat")["input_ids"])
    assert weights(output).keys() == weights(model).keys()
    assert any(not torch.equal(tensor, weights(model)[name]) for name, tensor in weights(output).items())
    for file in output.glob("*.json"):
        assert "seqtile" not in file.read_text(), file
    numbers = json.loads((output / "report" / "report.json").read_text())
    assert [row["step"] for row in numbers["losses"]] == [1, 2, 3, 4, 5]
    assert {"date", "command", "device", "versions"} <= numbers.keys()


def test_tiles_change_nothing_but_rounding(model: Path, dataset: Path, tmp_path: Path):
    tiled = run(model, dataset, tmp_path / "tiled")
    untiled = run(model, dataset, tmp_path / "untiled", tiled_mlp=False, tile=None)
    assert tiled.tiling is not None and tiled.tiling.tiled == 2
    assert untiled.tiling is None
    torch.testing.assert_close(torch.tensor(tiled.losses), torch.tensor(untiled.losses))
    assert tiled.losses[0][1] - tiled.losses[-1][1] > 0.1


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["full", "lora"])
def test_trl_and_peft_write_the_card(model: Path, dataset: Path, tmp_path: Path, lora: dict[str, int] | None):
    from huggingface_hub import ModelCard

    run(model, dataset, tmp_path / "out", steps=2, lora=lora)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "sft" in card.data.tags and card.data.base_model == (None if lora is None else str(model))


def test_spellings_of_other_trainers(model: Path, dataset: Path, tmp_path: Path, capsys):
    more = ["--use_tiled_mlp", "true", "--tiled_mlp_num_shards", "4", "--max_length", "64", "--learning_rate", "1e-2"]
    assert main(arguments(model, dataset, tmp_path / "peer", *more)) == 0
    assert "tiled 2 of 2 MLPs (LlamaMLP), 4 tiles" in capsys.readouterr().err
    ours = run(model, dataset, tmp_path / "ours", tile="shards:4")
    for name, tensor in weights(tmp_path / "peer").items():
        assert torch.equal(tensor, weights(ours.output)[name])


def test_a_saved_recipe_runs_again_to_the_same_losses(model: Path, dataset: Path, tmp_path: Path):
    first = run(model, dataset, tmp_path / "first", lora={"r": 2, "dropout": 0.1}, seed=3)
    again = train(first.recipe.model_copy(update={"output": str(tmp_path / "again")}))
    assert again.losses == first.losses
    assert main(["train", "--recipe", str(tmp_path / "first" / "recipe.yaml"), "--output", str(tmp_path / "cli")]) == 0
    for name, tensor in weights(tmp_path / "cli").items():
        assert torch.equal(tensor, weights(first.output)[name])


@pytest.mark.parametrize(
    "values", [{}, {"lora": {"r": 2, "dropout": 0.2}}, {"packing": "wrapped", "gradient_accumulation": 2}],
    ids=["full", "lora with dropout", "packed and accumulated"],
)  # fmt: skip
def test_interrupted_and_resumed_is_the_same_run(model: Path, dataset: Path, tmp_path: Path, values: dict[str, Any]):
    whole = run(model, dataset, tmp_path / "whole", **values)
    stopped = run(model, dataset, tmp_path / "parts", callbacks=[SignalAt(2)], **values)
    assert stopped.stopped_by == signal.SIGINT
    assert stopped.step == 2
    assert stopped.output == tmp_path / "parts" / "checkpoint-2"
    assert not list((tmp_path / "parts").glob("*.safetensors"))
    ran = StepsRun()
    resumed = run(model, dataset, tmp_path / "parts", resume=True, callbacks=[ran], **values)
    assert ran.steps == [3, 4, 5]
    assert resumed.losses == whole.losses
    assert len({loss for _, loss in whole.losses}) == 5
    for name, tensor in weights(whole.output).items():
        assert torch.equal(tensor, weights(resumed.output)[name])


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_saves_a_checkpoint_and_the_printed_command_continues(
    model: Path, dataset: Path, tmp_path: Path, number: signal.Signals, code: int
):
    # The real process, real signal: started with the steps of a day, stopped after the first one is shown.
    command = [sys.executable, "-m", "seqtile.cli", *arguments(model, dataset, tmp_path / "out", "--steps", "100000")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("step ")
        process.send_signal(number)
        _, errors = process.communicate(timeout=500)
    finally:
        process.kill()
    assert process.returncode == code, errors
    saved = re.search(r"checkpoint saved in (\S+)", errors)
    assert saved is not None and (Path(saved[1]) / "model.safetensors").is_file()
    step = int(Path(saved[1]).name.rpartition("-")[2])
    said = re.search(r"seqtile (train --resume --output \S+)", errors)
    assert said is not None
    assert main([*said[1].split(), "--steps", str(step + 1)]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize("numbers", [(signal.SIGTERM, signal.SIGTERM), (signal.SIGHUP,)], ids=str)
def test_sigterm_twice_and_sighup_save(model: Path, dataset: Path, tmp_path: Path, numbers: tuple[signal.Signals]):
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:  # the tests were started by nohup, which is respected
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    callbacks = [SignalAt(2, number) for number in numbers]
    stopped = run(model, dataset, tmp_path / "out", callbacks=callbacks)
    assert (stopped.stopped_by, stopped.output.name) == (numbers[0], "checkpoint-2")
    assert why_not_whole(stopped.output) == ""
    check_unlocked(tmp_path / "out")


def test_a_second_signal_stops_at_once():
    stop = StopOnSignal()
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)  # the handler runs between two bytecodes
        assert stop.received == signal.SIGINT
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0)
    assert signal.getsignal(signal.SIGINT) is before


def test_resume_refuses_another_run(model: Path, dataset: Path, tmp_path: Path):
    run(model, dataset, tmp_path / "out", steps=2, learning_rate=2e-5)
    for more, code, value in [
        (["--steps", "2"], "resume.finished", "2 steps"),
        (["--seed", "7"], "resume.key-changed", "seed"),
        (["--learning-rate", "0.1"], "resume.key-changed", "learning_rate"),
    ]:
        command_refused(arguments(model, dataset, tmp_path / "out", "--resume", *more), code, value)
    assert main(arguments(model, dataset, tmp_path / "out", "--resume", "--steps", "3", "--tile", "shards:2")) == 0


@pytest.mark.parametrize("lora", [None, {"r": 2}], ids=["full", "lora"])
@pytest.mark.parametrize("schedule", ["linear", "cosine", "constant"])
def test_more_steps_go_on_at_the_learning_rates_of_the_longer_run(
    model: Path, dataset: Path, tmp_path: Path, schedule: str, lora: dict[str, int] | None
):
    """The optimizer's checkpoint holds the last rate of the shorter schedule: zero."""
    values = {"trainer": {"lr_scheduler_type": schedule}, "lora": lora}

    def rates(output: Path) -> list[float]:
        return [json.loads(line)["learning_rate"] for line in (output / "metrics.jsonl").read_text().splitlines()]

    run(model, dataset, tmp_path / "whole", steps=4, **values)
    run(model, dataset, tmp_path / "more", steps=2, **values)
    before = weights(tmp_path / "more")
    run(model, dataset, tmp_path / "more", steps=4, resume=True, callbacks=[SignalAt(3)], **values)
    after = load_file(next((tmp_path / "more" / "checkpoint-3").glob("*model.safetensors")))
    assert any(not torch.equal(weight, before[name]) for name, weight in after.items())
    run(model, dataset, tmp_path / "more", steps=4, resume=True, **values)
    assert rates(tmp_path / "more")[2:] == rates(tmp_path / "whole")[2:]
    assert min(rates(tmp_path / "whole")) > 0


def test_fewer_steps_than_are_done_are_refused(model: Path, dataset: Path, tmp_path: Path):
    run(model, dataset, tmp_path / "out", callbacks=[SignalAt(3)])
    before = sorted((tmp_path / "out").rglob("*"))
    command = ["train", "--resume", "--output", str(tmp_path / "out"), "--steps", "2"]
    command_refused(command, "resume.beyond-steps", "checkpoint-3 has done 3 steps", "--steps 2")
    assert sorted((tmp_path / "out").rglob("*")) == before
    assert main(["train", "--resume", "--output", str(tmp_path / "out"), "--steps", "3"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_resume_without_a_checkpoint(model: Path, dataset: Path, tmp_path: Path):
    run(model, dataset, tmp_path / "out", steps=1, trainer={"save_strategy": "no"})
    command_refused(["train", "--resume", "--output", str(tmp_path / "out")], "resume.no-checkpoint")


def test_an_earlier_run_is_replaced_only_when_told(model: Path, dataset: Path, tmp_path: Path):
    output = tmp_path / "out"
    run(model, dataset, output, lora={"r": 2})
    (output / "notes.md").write_text("mine")
    (output / "checkpoint-99").mkdir()
    before = {path: path.read_bytes() for path in output.rglob("*") if path.is_file()}
    command_refused(arguments(model, dataset, output), "output.not-empty", "--resume")
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    command_refused(arguments(model, dataset, output, "--overwrite", "--tile", "0"), "option.malformed", "tile=0")
    assert {path: path.read_bytes() for path in output.rglob("*") if path.is_file()} == before
    assert main(arguments(model, dataset, output, "--overwrite")) == 0
    assert not list(output.glob("adapter_*")), "an adapter left behind would be loaded in place of the new model"
    assert not (output / "checkpoint-99").exists(), "a resume would continue the run that was replaced"
    assert (output / "model.safetensors").is_file()
    assert (output / "notes.md").read_text() == "mine"


def test_lora_trains_adapters_and_they_load(model: Path, dataset: Path, tmp_path: Path):
    outcome = run(model, dataset, tmp_path / "out", lora={"r": 2, "alpha": 8, "dropout": 0.1})
    saved = weights(outcome.output)
    assert all("lora_" in name for name in saved)
    assert any("mlp.gate_proj" in name for name in saved)
    assert all(tensor.abs().sum() > 0 for name, tensor in saved.items() if "lora_B" in name), "an adapter did not train"
    AutoModelForCausalLM.from_pretrained(outcome.output)


def test_lora_on_experts_is_tiled(dataset: Path, tmp_path: Path):
    directory = tmp_path / "experts"
    vocabulary = tiny_run.save_tokenizer(directory)
    config = CONFIG_MAPPING["qwen3_moe"](
        vocab_size=vocabulary, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=20, max_position_embeddings=tiny_run.POSITIONS, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=24, decoder_sparse_step=1, eos_token_id=0, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    adapters = {"r": 2, "target_modules": ["q_proj", "gate_up_proj", "down_proj"]}
    outcome = run(directory, dataset, tmp_path / "out", steps=2, lora=adapters)
    assert any("experts" in name for name in weights(outcome.output)), "no adapter is on the experts"
    assert outcome.ran == "batches of up to 64 tokens were cut into up to 4 tiles"
    assert "tiled 2 of 2 experts" in str(outcome.tiling)


def test_projections_are_tiled_with_their_adapters(model: Path, dataset: Path, tmp_path: Path):
    outcome = run(model, dataset, tmp_path / "out", steps=1, lora={"r": 2}, blocks="mlp+norm+projections")
    assert "8 projections tiled" in str(outcome.tiling) and "adapters were added to" not in str(outcome.tiling)


KINDS: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "the cat sees the house."}] * 2,
    "messages": [{"messages": [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "the cat."}]}] * 2,
    "prompt": [{"prompt": "who sees the house? ", "completion": "the cat."}] * 2,
    "input_ids": [{"input_ids": list(range(1, 40))}] * 2,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_rows_of_every_kind(model: Path, tmp_path: Path, kind: str, ending: str):
    path = tmp_path / f"rows.{ending}"
    if ending == "jsonl":
        tiny_run.write_jsonl(path, KINDS[kind])
    else:
        from datasets import Dataset

        Dataset.from_list(KINDS[kind]).to_parquet(path)
    assert run(model, path, tmp_path / "out", steps=1).step == 1


def test_text_files_are_packed_so_that_no_text_is_dropped(model: Path, tmp_path: Path):
    folder = tmp_path / "texts"
    (folder / "part").mkdir(parents=True)
    for name in ("a.txt", "part/b.py"):
        (folder / name).write_text("x" * 159)
    (folder / "picture.bin").write_bytes(b"\xff\xfe\x81")
    # Two documents of 159 characters and an end token each are exactly five rows of 64 tokens.
    outcome = run(model, folder, tmp_path / "out", steps=None)
    assert outcome.step == 5
    assert run(model, folder / "a.txt", tmp_path / "one", steps=None).step == 3
    assert run(model, folder / "a.txt", tmp_path / "cut", steps=None, packing=False).step == 1


def test_rows_saved_by_datasets_and_a_text_column_of_another_name(model: Path, tmp_path: Path):
    from datasets import Dataset

    Dataset.from_list([{"story": "the cat sees the house."}]).save_to_disk(tmp_path / "rows")
    outcome = run(model, tmp_path / "rows", tmp_path / "out", steps=1, trainer={"dataset_text_field": "story"})
    assert outcome.step == 1


def test_rope_scaling_reaches_past_the_models_positions(model: Path, tmp_path: Path):
    rows = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": list(range(1, 200)) * 2}])
    outcome = run(
        model, rows, tmp_path / "out", steps=1, max_length=398, rope_scaling={"rope_type": "yarn", "factor": 2}
    )
    config = AutoModelForCausalLM.from_pretrained(outcome.output).config
    assert config.max_position_embeddings == 2 * tiny_run.POSITIONS
    assert config.rope_parameters["rope_type"] == "yarn"


def test_loss_tiles_give_the_trainers_own_losses(model: Path, dataset: Path, tmp_path: Path):
    ours = run(model, dataset, tmp_path / "ours", loss_tile=10)
    theirs = run(model, dataset, tmp_path / "theirs")
    torch.testing.assert_close(torch.tensor(ours.losses), torch.tensor(theirs.losses))
    for name, tensor in weights(ours.output).items():
        torch.testing.assert_close(tensor, weights(theirs.output)[name])


def test_activation_checkpointing_is_never_reentrant_unasked(model: Path, dataset: Path, tmp_path: Path, caplog):
    with caplog.at_level(logging.INFO, logger="seqtile"):
        run(
            model,
            dataset,
            tmp_path / "out",
            steps=1,
            trainer={"gradient_checkpointing_kwargs": {"preserve_rng_state": True}},
        )
    assert "reentrant" not in caplog.text


def test_default_output_never_reuses_a_directory(model: Path, dataset: Path, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = {"model": str(model), "dataset": str(dataset), "max_length": 64, "steps": 1, "report": False}
    outputs = [str(train(build_recipe(values, {})[0]).output) for _ in range(2)]
    assert outputs == [f"runs/{model.name}", f"runs/{model.name}-2"]


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.yaml")))
def test_example_recipes_run(model: Path, dataset: Path, tmp_path: Path, name: str):
    values = read_recipe(EXAMPLES / name)
    for key in ("epochs", "gradient_accumulation"):
        values.pop(key, None)
    flags = dict(model=str(model), dataset=str(dataset), output=str(tmp_path / "out"), max_length=64, steps=1)
    outcome = train(build_recipe(values, flags)[0])
    assert outcome.step == 1
    assert outcome.tiling is not None and outcome.tiling.tiled == 2


def test_a_dataset_of_the_hub_is_asked_for_by_id_and_split(monkeypatch: pytest.MonkeyPatch):
    import datasets

    rows = datasets.Dataset.from_list(KINDS["text"])
    splits = {"train": rows, "long": rows.select([0])}
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, config, split, streaming: {"org/name": splits}[name][split]
    )
    assert len(load_rows("org/name").rows) == 2
    assert len(load_rows("org/name", split="long").rows) == 1
    with refused("dataset.unreadable", "'org/name'", "dataset_split 'test'"):
        load_rows("org/name", split="test")


@pytest.mark.parametrize("blocks", ["mlp", "mlp+norm"])
def test_every_layers_block_is_found_at_the_peak_of_its_backward(blocks: str):
    from transformers import LlamaConfig, LlamaForCausalLM

    from seqtile.counting.live import count_live_bytes
    from seqtile.planner.phases import label_phases, run_step

    # Of three layers whose MLP is 64 times as wide as the rest, nothing but the MLPs can hold much.
    config = LlamaConfig(
        vocab_size=16, hidden_size=16, intermediate_size=1024, num_hidden_layers=3, num_attention_heads=1, head_dim=12
    )
    model = LlamaForCausalLM(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    tiled = seqtile.apply(model, tile=8, blocks=blocks).blocks
    seqtile.undo(model)
    batch = {"input_ids": torch.arange(128)[None] % 16, "use_cache": False}
    with count_live_bytes() as live, label_phases(live, model, tiled) as labels:
        run_step(model, {**batch, "labels": batch["input_ids"]}, labels)
    peaks: dict[str, int] = {}
    for phase, row in live.phases.items():
        peaks[phase.part] = max(peaks.get(phase.part, 0), row.peak)
    block = peaks.pop("MLP" if blocks == "mlp" else "MLP and norms")
    assert peaks.keys() == {"attention", "head and loss", "rest of the model"}
    assert max(peaks.values()) < block / 2, peaks


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["--fit-memory", "4GiB"], ["--state", "16"]], ids=["fit", "state"])
def test_a_hybrid_model_trains_with_what_was_chosen_for_its_states(flags: list[str], tmp_path: Path) -> None:
    if "lfm2" not in CONFIG_MAPPING:
        pytest.skip("transformers has no lfm2")
    model = tmp_path / "model"
    config = AutoConfig.for_model(
        "lfm2", vocab_size=tiny_run.save_tokenizer(model), hidden_size=32, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, bos_token_id=None, eos_token_id=0,
        layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, pad_token_id=0,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    rows = tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows())
    run = ["train", "--model", str(model), "--dataset", str(rows), "--output", str(tmp_path / "run")]
    assert main([*run, "--max-length", "64", "--steps", "2", *flags]) == 0
    assert {"README.md", "complete.json"} <= {file.name for file in (tmp_path / "run").iterdir()}


@pytest.mark.parametrize("stop", [4, 6], ids=["at the end of epoch 1", "inside epoch 2"])
def test_a_resumed_step_has_the_rows_of_the_whole_runs(
    model: Path, tmp_path: Path, stop: int, monkeypatch: pytest.MonkeyPatch
):
    """Ten rows, three a step: the last step of each epoch has one."""
    from seqtile.train.trainer import Trainer

    rows = tiny_run.write_jsonl(tmp_path / "rows.jsonl", [{"input_ids": [9 + i, *range(5, 20 + i)]} for i in range(10)])
    run_step, seen = Trainer.training_step, dict[int, list[int]]()

    def remembered(self: Any, model: Any, inputs: Any, *more: Any, **how: Any) -> Any:
        seen.setdefault(self.state.global_step + 1, []).extend(row[0] for row in inputs["input_ids"].tolist())
        return run_step(self, model, inputs, *more, **how)

    monkeypatch.setattr(Trainer, "training_step", remembered)
    values: dict[str, Any] = {"gradient_accumulation": 3, "steps": 9, "trainer": {"lr_scheduler_type": "constant"}}
    run(model, rows, tmp_path / "whole", **values)
    whole = dict(seen)
    assert [len(whole[step]) for step in range(1, 10)] == [3, 3, 3, 1, 3, 3, 3, 1, 3]
    assert sorted(sum((whole[step] for step in range(1, 5)), [])) == [*range(9, 19)]
    assert [whole[step] for step in range(1, 5)] != [whole[step] for step in range(5, 9)]
    seen.clear()
    run(model, rows, tmp_path / "parts", **values, callbacks=[SignalAt(stop)])
    run(model, rows, tmp_path / "parts", **values, resume=True)
    assert seen == whole
