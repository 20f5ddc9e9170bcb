"""Every recipe and script of examples/ that starts no processes runs on a tiny model; its plan is the one it names."""

from __future__ import annotations

import re
import runpy
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny_run
from seqtile.train.recipe import build_recipe, read_recipe
from seqtile.train.run import train

EXAMPLES = Path(__file__).parents[2] / "examples"
CARDS = sorted(path for card in ("24gb", "80gb", "8gpus") for path in (EXAMPLES / card).glob("*.yaml"))
README = (EXAMPLES / "README.md").read_text(encoding="utf-8")
PLANS = re.findall(r"`seqtile plan (.*?)`", README)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_run.save_model(tmp_path_factory.mktemp("model"))


def script(name: str, *words: object) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the trainers have to say about their own defaults
        return runpy.run_path(str(EXAMPLES / "scripts" / name))["main"]([str(word) for word in words])


@pytest.mark.parametrize("path", CARDS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipe(path: Path, model: Path, tmp_path: Path) -> None:
    """On one process and the CPU: without flash attention, which needs a GPU, and without the engine, which
    tests/distributed launches. Everything else of the recipe is as it is, but for the length."""
    values = read_recipe(path)
    assert values.pop("attention") == "flash"
    engine = {key: values.pop(key) for key in ("engine", "nproc") if key in values}
    build_recipe({**engine, "model": "m", "dataset": "d"}, {})
    dataset = tiny_run.write_jsonl(tmp_path / "rows.jsonl", tiny_run.text_rows())
    flags = dict(model=str(model), dataset=str(dataset), output=str(tmp_path / "out"), max_length=64, steps=2)
    outcome = train(build_recipe({**values, "tile": 16, "report": False}, flags)[0])
    assert outcome.step == 2 and outcome.tiling is not None and outcome.tiling.tiled == 2
    assert ("checkpoint" in outcome.tiling.done) == bool(values.get("offload"))


@pytest.mark.parametrize("path", CARDS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_recipe_is_the_plan_that_it_names(path: Path) -> None:
    planned = re.search(r"^# Planned with: seqtile plan (.*)$", path.read_text(encoding="utf-8"), re.M)
    assert planned and planned[1] in PLANS
    flags = dict(re.findall(r"--([a-z-]+) (\S+)", planned[1]))
    values = read_recipe(path)
    assert values["max_length"] == int(flags["max-length"])
    assert values.get("engine") == flags.get("engine") and values.get("nproc", 1) == int(flags.get("gpus", 1))
    assert f"r={values['lora']['r']}" == flags["lora"] if "lora" in values else "lora" not in flags
    assert values.get("offload", False) == (flags.get("offload") == "checkpoints")
    assert values.get("dtype") == flags.get("dtype")
    assert values.get("optimizer") == flags.get("optimizer")


def test_the_readme_names_every_example_and_plans_that_run() -> None:
    for path in [*CARDS, *(EXAMPLES / "scripts").glob("*.py")]:
        assert f"| `{path.parent.name}/{path.name}` |" in README
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60, path
    assert len(PLANS) >= len(CARDS)


def test_dpo(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tiny_run.SENTENCES
    rows = [{"prompt": words[i], "chosen": words[i + 3], "rejected": words[i + 9]} for i in range(6)]
    dataset = tiny_run.write_jsonl(tmp_path / "pairs.jsonl", rows)
    script("dpo.py", model, dataset, "--output", tmp_path / "out", "--max-length", 64, "--steps", 2)
    assert "tiled 2 of 2 MLPs (LlamaMLP)" in capsys.readouterr().out
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_distill(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tiny_run.SENTENCES
    rows = [
        {"messages": [{"role": "user", "content": words[i]}, {"role": "assistant", "content": words[i + 3]}]}
        for i in range(4)
    ]
    folder = shutil.copytree(model, tmp_path / "model")
    template = "{% for message in messages %}{{ message['content'] + ' ' }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    dataset = tiny_run.write_jsonl(tmp_path / "rows.jsonl", rows)
    more = ["--length", 64, "--max-completion", 8, "--steps", 2]
    script("distill.py", folder, model, dataset, "--output", tmp_path / "out", *more)
    said = capsys.readouterr().out
    assert "tiled 2 of 2 MLPs" in said and "divergence from the two heads" in said
    assert list((tmp_path / "out").glob("*.safetensors"))


def test_grpo(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"prompt": sentence, "answer": "e"} for sentence in tiny_run.SENTENCES[:6]]
    dataset = tiny_run.write_jsonl(tmp_path / "prompts.jsonl", rows)
    more = ("--max-completion", 8, "--generations", 2, "--steps", 1)
    script("grpo.py", model, dataset, "--output", tmp_path / "out", *more)
    assert "tiled 2 of 2 MLPs (LlamaMLP)" in capsys.readouterr().out
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
    script("grpo.py", model, dataset, "--output", tmp_path / "out", *more, "--at-once", 2)
    assert "model: shared prompts are computed once" in capsys.readouterr().out


def test_embedding(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = tiny_run.SENTENCES
    rows = [{"anchor": words[i], "positive": words[i] + " " + words[i + 1]} for i in range(8)]
    dataset = tiny_run.write_jsonl(tmp_path / "pairs.jsonl", rows)
    script("embedding.py", model, dataset, "--output", tmp_path / "out", "--steps", 3, "--max-length", 48)
    told = capsys.readouterr().out
    assert "tiled 2 of 2 MLPs (LlamaMLP)" in told and told.count("loss") == 3
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()


def test_evaluate(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    rows = tiny_run.text_rows(3)
    got = script("evaluate.py", model, tiny_run.write_jsonl(tmp_path / "texts.jsonl", rows), "--max-length", 64)
    assert "tiled 2 of 2 MLPs (LlamaMLP)" in capsys.readouterr().out
    plain, tokenizer = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    total = count = 0.0
    for row in rows:
        ids = tokenizer(row["text"], truncation=True, max_length=64, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            total += torch.nn.functional.cross_entropy(plain(ids).logits[0, :-1], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    assert got == pytest.approx(float(torch.tensor(total / count).exp()))


def test_long_video(capsys: pytest.CaptureFixture[str]) -> None:
    peaks = [*script("long_video.py", "--frames", 16, "--steps", 2).values()]
    assert peaks[1] < peaks[0] / 2
    losses = re.findall(r"loss ([\d.]+)", capsys.readouterr().out)
    assert len(losses) == 4 and [float(loss) for loss in losses[:2]] == pytest.approx(
        [*map(float, losses[2:])], abs=2e-5
    )


def test_vision_language(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    template = "{% for m in messages %}{% for c in m['content'] %}{{ '<image>' if c['type'] == 'image' else c['text'] }}{% endfor %}{% endfor %}"  # noqa: E501
    tiny_run.save_llava(tmp_path / "model", template)
    Image.new("RGB", (9, 8), (200, 30, 30)).save(tmp_path / "red.png")
    rows = [{"image": str(tmp_path / "red.png"), "question": "what colour?", "answer": "red, all of it."}]
    dataset = tiny_run.write_jsonl(tmp_path / "pictures.jsonl", rows)
    script("vision_language.py", tmp_path / "model", dataset, "--output", tmp_path / "out", "--steps", 3)
    told = capsys.readouterr().out
    assert "tiled 2 of 2 MLPs (LlamaMLP)" in told
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", told)]
    assert len(losses) == 3 and losses[-1] < losses[0]
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
