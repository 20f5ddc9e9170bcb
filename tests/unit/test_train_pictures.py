"""Rows with pictures and videos: what of them reaches TRL's collator, what is refused, and their tokens."""

from __future__ import annotations

import base64
import io
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

import tiny_run
from refusals import refused
from seqtile import UserError
from seqtile.planner import pictures
from seqtile.train import fit, run
from seqtile.train.data import load_rows
from seqtile.train.load import processor_of
from seqtile.train.media import RowError, open_picture
from seqtile.train.read_data import check_rows, read_data
from seqtile.train.recipe import Recipe, build_recipe, resolve
from seqtile.train.rendered_rows import RowSet
from seqtile.train.resume import digest_rows
from seqtile.train.row_formats import RowFormat, find_key_columns

Image = pytest.importorskip("PIL.Image")
ANSWER = {"role": "assistant", "content": "the cat."}
TEXT = {"type": "text", "text": "who?"}
IMAGE, VIDEO = {"type": "image"}, {"type": "video"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, four pictures and a file that is none."""
    folder = tmp_path_factory.mktemp("pictures")
    tiny_run.save_qwen_vl(folder / "model")
    for number in range(4):
        tiny_run.save_picture(folder / f"{number}.png", number, 16, 24)
    tiny_run.save_picture(folder / "large.png", 9, 40, 40)
    (folder / "broken.png").write_bytes((folder / "0.png").read_bytes()[:200])
    return folder


def encoded(file: Path) -> str:
    return base64.b64encode(file.read_bytes()).decode()


def chat(*parts: dict[str, Any], **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [*parts]}, ANSWER], **columns}


def said(text: str, **columns: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, ANSWER], **columns}


def read(row: dict[str, Any], folder: Path, **settings: Any) -> dict[str, Any]:
    key_columns = find_key_columns([*row], "rows", "text")
    return RowFormat(key_columns, tuple(row), media=True, folder=str(folder), **settings).read(row)


READ: dict[str, tuple[dict[str, Any], list[Any], list[str]]] = {
    "a part with its picture": (chat({**IMAGE, "image": "0.png"}, TEXT), [IMAGE, TEXT], ["0.png"]),
    "a part with its path": (chat(TEXT, {**IMAGE, "path": "0.png"}), [TEXT, IMAGE], ["0.png"]),
    "OpenAI's part": (chat({"type": "image_url", "image_url": {"url": "0.png"}}, TEXT), [IMAGE, TEXT], ["0.png"]),
    "nulls of Arrow": (
        chat({**IMAGE, "image": "0.png", "text": None}, {**TEXT, "image": None}), [IMAGE, TEXT], ["0.png"],
    ),
    "parts and a column": (
        chat(IMAGE, TEXT, IMAGE, images=["0.png", "1.png"]), [IMAGE, TEXT, IMAGE], ["0.png", "1.png"],
    ),
    "a column, and texts": (said("who?", images=["0.png", "1.png"]), [IMAGE, IMAGE, TEXT], ["0.png", "1.png"]),
    "a column of one": (said("who?", image="0.png"), [IMAGE, TEXT], ["0.png"]),
    "ms-swift's marks": (
        said("a <image> b <image>", images=["1.png", "0.png"]),
        [{"type": "text", "text": "a "}, IMAGE, {"type": "text", "text": " b "}, IMAGE], ["1.png", "0.png"],
    ),
    "a question and its answer": (
        {"instruction": "who?", "output": "the cat.", "images": ["0.png"]}, [IMAGE, TEXT], ["0.png"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READ)
def test_every_way_to_name_pictures_gives_the_same_row(case: str, folder: Path) -> None:
    row, content, names = READ[case]
    result = read(row, folder)
    assert result.get("messages", result.get("prompt"))[0]["content"] == content
    assert [Path(file["path"]) for file in result["images"]] == [folder / name for name in names]
    assert result["sizes"]["image"] == [[16, 24]] * len(names) and not result["videos"]


def test_frames_of_a_video_are_listed(folder: Path) -> None:
    names = ["2.png", "3.png", "1.png"]
    for row in (chat({**VIDEO, "video": names}, TEXT), said("<video>who?", videos=[names])):
        result = read(row, folder)
        assert result["messages"][0]["content"] == [VIDEO, TEXT]
        (video,) = result["videos"]
        assert [Path(file["path"]).name for file in video["frames"]] == names
        assert result["sizes"]["video"] == [[3, 16, 24]]


@pytest.mark.parametrize("ending", ["part", "data URL", "bytes"])
def test_pictures_without_a_file(ending: str, folder: Path) -> None:
    content = encoded(folder / "0.png")
    part: dict[str, Any] = {
        "part": {"base64": content}, "data URL": {"image": f"data:image/png;base64,{content}"},
        "bytes": {"image": {"bytes": (folder / "0.png").read_bytes(), "path": "gone.png"}},
    }[ending]  # fmt: skip
    (file,) = read(chat({**IMAGE, **part}, TEXT), folder)["images"]
    expected = Image.open(folder / "0.png").convert("RGB")
    assert open_picture(file).tobytes() == expected.tobytes()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a missing file": (chat({**IMAGE, "image": "gone.png"}), "gone.png' does not exist"),
    "a broken file": (chat({**IMAGE, "image": "broken.png"}), "broken.png' cannot be read"),
    "no base64": (chat({**IMAGE, "base64": "é"}), "not valid base64"),
    "a URL": (chat({**IMAGE, "url": "https://example.org/cat.png"}), "https://example.org/cat.png' is not on this"),
    "a place too many": (chat(IMAGE, IMAGE, images=["0.png"]), "more parts"),
    "a file too many": (chat(IMAGE, images=["0.png", "1.png"]), "2 entries"),
    "a mark too many": (said("<image> <image>", images=["0.png"]), "2 marks"),
    "frames of several sizes": (chat({**VIDEO, "video": ["0.png", "large.png"]}), "several sizes"),
    "a setting that nothing reads": (chat({**IMAGE, "image": "0.png", "max_pixels": 2}), "'max_pixels'"),
    "sound": (chat({"type": "audio", "audio": "a.wav"}), "'audio'"),
    "text alone": ({"prompt": "who?", "completion": "the cat.", "images": ["0.png"]}, "'images' need 'messages'"),
    "a video of a pair": ({"prompt": [{"role": "user", "content": [{**VIDEO, "video": ["0.png"]}, TEXT]}],
                           "completion": [ANSWER]}, "has a video"),
    "a picture of an answer": ({"prompt": [{"role": "user", "content": "draw"}],
                                "completion": [{"role": "assistant", "content": [{**IMAGE, "image": "0.png"}, TEXT]}]},
                               "'completion' has a picture"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_lost_or_cannot_be_read_is_refused(case: str, folder: Path) -> None:
    row, words = REFUSED[case]
    with pytest.raises(RowError, match=words):
        read(row, folder)


def test_pictures_of_datasets_are_not_decoded_before_they_are_needed(folder: Path) -> None:
    from datasets import Dataset, Features, List, Value
    from datasets import Image as Picture

    messages = List({"role": Value("string"), "content": Value("string")})
    rows = Dataset.from_list(
        [said("who?", images=[str(folder / f"{number}.png")]) for number in range(3)],
        features=Features({"messages": messages, "images": List(Picture())}),
    )
    rows.save_to_disk(str(folder / "saved"))
    rows.to_parquet(str(folder / "rows.parquet"))
    for path in ("saved", "rows.parquet"):
        checked = check_rows(load_rows(str(folder / path)), media=True)
        for number, row in enumerate(checked.rows):
            expected = Image.open(folder / f"{number}.png").convert("RGB")
            assert open_picture(row["images"][0]).tobytes() == expected.tobytes()


def recipe_of(folder: Path, rows: list[dict[str, Any]], **values: Any) -> Recipe:
    data = tiny_run.write_jsonl(folder / "rows.jsonl", rows)
    paths = {"model": str(folder / "model"), "dataset": str(data), "trust_remote_code": True, "steps": 1}
    return resolve(build_recipe({**paths, "max_length": 128, **values}, {})[0])


def read_set(folder: Path, rows: list[dict[str, Any]], **values: Any) -> tuple[Any, RowSet]:
    data = read_data(recipe_of(folder, rows, **values), folder / "out", lambda _: None)
    return data, data.sets["train"]


def test_a_batch_is_that_of_trl_but_for_labels_of_pictures(folder: Path) -> None:
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

    from seqtile.train.picture_batches import picture_collator

    rows = [chat({**IMAGE, "image": f"{number}.png"}, TEXT) for number in range(3)]
    rows += [said("large <image>", images=["large.png"]), said("no picture")]
    data, row_set = read_set(folder, rows)
    config = AutoConfig.from_pretrained(folder / "model")
    collate = picture_collator(data.processor, data.arguments, config, pair=False, whole=False)
    batch = collate([*row_set.rows])
    pictures = [[Image.open(folder / f"{number}.png")] for number in range(3)] + [
        [Image.open(folder / "large.png")],
        [],
    ]
    examples = [
        {"messages": row["messages"], "images": images} for row, images in zip(row_set.rows, pictures, strict=True)
    ]
    expected = DataCollatorForVisionLanguageModeling(data.processor, max_length=128)(examples)
    assert batch.keys() == expected.keys()
    is_picture = torch.isin(batch["input_ids"], torch.tensor(collate.visual))
    assert is_picture.sum() == 3 * 6 + 25
    for name, value in expected.items():
        value = value.masked_fill(is_picture, -100) if name == "labels" else value
        torch.testing.assert_close(batch[name], value, rtol=0, atol=0)


def test_every_frame_of_a_list_is_trained_on_with_its_time(folder: Path) -> None:
    names = [f"{number % 4}.png" for number in range(7)]
    data, row_set = read_set(folder, [chat({**VIDEO, "video": names, "fps": 2}, TEXT)])
    assert data.processor.decode(row_set.sample[0].ids).count("<|video_pad|>") == 7 * 6
    assert "<3.5 seconds>" in data.processor.decode(row_set.sample[0].ids)


def test_the_tokens_of_every_row_are_counted_before_anything_is_loaded(folder: Path) -> None:
    from seqtile.train.picture_batches import count_by_size, picture_collator

    video = {**VIDEO, "video": ["2.png", "3.png"], "fps": 0.5}
    rows = [chat(video, TEXT, {**IMAGE, "image": "large.png"}), said("who?"), said("<image>", images=["0.png"])]
    data, row_set = read_set(folder, rows)
    config = AutoConfig.from_pretrained(folder / "model")
    collate = picture_collator(data.processor, data.arguments, config, pair=False, whole=True)
    for row in row_set.rows:
        tokens = count_by_size(row, collate)
        assert tokens is not None
        ids = collate([row])["input_ids"][0].tolist()
        places = [place for place, token in enumerate(ids) if token in collate.visual]
        assert (tokens.total, tokens.visual) == (len(ids), len(places))
        assert tokens.needed == max(places, default=-1) + 1
    summary = row_set.summary
    assert summary is not None and (summary.pictures, summary.frames, summary.visual) == (2, 2, (0, 2 * 6 + 25))
    assert summary.tokens == sum(len(collate([row])["input_ids"][0]) for row in row_set.rows)


@pytest.mark.parametrize("processor", ["counts nothing", "counts pictures alone", "writes words around pictures"])
def test_rows_that_no_size_counts_are_processed(processor: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(recipe: Recipe) -> Any:
        loaded = processor_of(recipe)
        base: Any = type(loaded)

        class Other(base):  # type: ignore[misc]
            def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
                if processor == "writes words around pictures":  # as Gemma 3's
                    text = [each.replace(self.image_token, f"see {self.image_token} here") for each in text]
                return super().__call__(images=images, text=text, **kwargs)

            def _get_num_multimodal_tokens(self, **sizes: Any) -> Any:
                if processor == "counts nothing":
                    raise NotImplementedError
                counts = super()._get_num_multimodal_tokens(**sizes)
                if processor == "counts pictures alone":
                    counts.num_video_tokens = None
                return counts

        loaded.__class__ = Other
        return loaded

    monkeypatch.setattr("seqtile.train.read_data.processor_of", load)
    video = {**VIDEO, "video": ["2.png", "3.png"]}
    rows = [said("<image>", images=["0.png"]), said("who?"), chat(video, TEXT), chat({**IMAGE, "image": "large.png"})]
    data, row_set = read_set(folder, rows)
    from seqtile.train.picture_batches import picture_collator

    config = AutoConfig.from_pretrained(folder / "model")
    collate = picture_collator(data.processor, data.arguments, config, pair=False, whole=True)
    ids = [collate([row])["input_ids"][0].tolist() for row in row_set.rows]
    assert row_set.summary is not None and row_set.summary.tokens == sum(map(len, ids))
    needed = (
        max(max((place for place, token in enumerate(row) if token in collate.visual), default=0) for row in ids) + 1
    )
    read_set(folder, rows, max_length=needed)
    with refused("images.row-too-long"):
        read_set(folder, rows, max_length=needed - 1)


@pytest.mark.parametrize("kind", ["picture", "frame"])
def test_a_resumed_run_sees_that_a_file_has_other_contents(kind: str, folder: Path, tmp_path: Path) -> None:
    file = tiny_run.save_picture(tmp_path / "same.png", 1, 16, 24)
    part = {**IMAGE, "image": str(file)} if kind == "picture" else {**VIDEO, "video": [str(file)]}
    _, row_set = read_set(folder, [chat(part, TEXT)])
    before = digest_rows(row_set.rows)
    content = file.read_bytes()
    file.write_bytes(content)  # later
    assert digest_rows(row_set.rows) == before
    tiny_run.save_picture(file, 2, 16, 24)
    assert digest_rows(row_set.rows) != before


def test_a_configuration_that_names_no_token_of_pictures(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [said("<image>", images=["0.png"])]
    read_set(folder, rows)
    monkeypatch.setattr("seqtile.train.picture_batches.VISUAL", ("media_placeholder_token_id",))
    with refused("images.model-without-token", "media_placeholder_token_id"):
        read_set(folder, rows)


@pytest.mark.parametrize("kind", ["pictures", "frames"])
def test_too_many_pictures_are_refused_with_how_many_fit(kind: str, folder: Path) -> None:
    def row(count: int) -> dict[str, Any]:
        names = [f"{number % 4}.png" for number in range(count)]
        parts = [{**VIDEO, "video": names}] if kind == "frames" else [{**IMAGE, "image": name} for name in names]
        return chat(*parts, TEXT)

    with refused("images.row-too-long", "row 2: 12 ", "of up to 6 tokens") as raised:
        read_set(folder, [row(1), row(12)], max_length=64)
    fitting = int(str(raised.value).partition(" would")[0].rpartition(" ")[2])
    assert 0 < fitting < 12
    read_set(folder, [row(1), row(fitting)], max_length=64)
    with refused("images.row-too-long", "row 2"):
        read_set(folder, [row(1), row(fitting + 1)], max_length=64)
    _, row_set = read_set(folder, [row(1), row(12), row(2)], max_length=64, skip_bad_rows=True)
    assert len(row_set.rows) == 2 and sum(row_set.left_out.values()) == 1


def test_a_bad_file_is_refused_with_its_row_before_a_weight_is_read(folder: Path) -> None:
    rows = [chat({**IMAGE, "image": name}, TEXT) for name in ("0.png", "broken.png", "1.png")]
    with refused("dataset.invalid-row", "row 2", "broken.png"):
        read_set(folder, rows)
    _, row_set = read_set(folder, rows, skip_bad_rows=True)
    assert len(row_set.rows) == 2


def test_rows_without_any_picture_are_text(folder: Path) -> None:
    data, row_set = read_set(folder, [said("who?", images=[])] * 2)
    assert data.processor is None and row_set.rows.column_names == ["messages"]


@pytest.mark.parametrize(
    ("values", "code"),
    [
        ({"packing": True}, "images.with-packing"),
        ({"streaming": True}, "dataset.invalid-row"),
        *(({"engine": engine, "nproc": 2}, "images.mixed-rows") for engine in ("zero2", "zero3")),
        ({"engine": "zero3", "nproc": 2, "lora": {"r": 2}}, "images.mixed-rows"),
        ({"engine": "zero2", "nproc": 2, "lora": {"r": 2, "target_modules": ["qkv"]}}, "images.mixed-rows"),
    ],
    ids=str,
)
def test_what_would_lose_pictures_or_wait_for_ever_is_refused(values: dict[str, Any], code: str, folder: Path) -> None:
    from seqtile.train.read_data import refuse_beside_pictures

    rows = [chat({**IMAGE, "image": "0.png"}, TEXT), said("who?")]
    if "engine" in values:
        data, row_set = read_set(folder, rows)
        with refused(code):
            refuse_beside_pictures(recipe_of(folder, rows, **values), {"train": row_set}, data.arguments)
        return
    with refused(code):
        read_set(folder, rows, **values)


@pytest.mark.parametrize("place", ["the row with a picture", "a row of text"])
@pytest.mark.parametrize("column", ["tools", "chat_template_kwargs", "weights"])
def test_what_the_collator_of_pictures_does_not_read_is_refused_in_every_row(
    column: str, place: str, folder: Path
) -> None:
    rows = [said("<image>who?", images=["0.png"]), said("who?", images=[])]
    row = rows[place == "a row of text"]
    if column == "weights":
        row["messages"] = [*row["messages"], said("and?")["messages"][0], {**ANSWER, "weight": 0}]
    else:
        row[column] = {"tools": [{"name": "look"}], "chat_template_kwargs": {"enable_thinking": False}}[column]
    trainer = {"assistant_only_loss": True} if column == "weights" else {}
    with refused("images.column-unsupported", f"row {1 + rows.index(row)}:"):
        read_set(folder, rows, trainer=trainer)


def test_engines_that_reduce_unused_weights_train_rows_with_and_without_pictures(folder: Path) -> None:
    from seqtile.train.read_data import refuse_beside_pictures

    rows = [chat({**IMAGE, "image": "0.png"}, TEXT), said("who?")]
    data, row_set = read_set(folder, rows)
    on_text, on_tower = {"r": 2}, {"r": 2, "target_modules": ["qkv"]}
    for engine, lora in [("zero2", on_text), *product(("ddp", "fsdp2"), (None, on_text, on_tower))]:
        recipe = recipe_of(folder, rows, engine=engine, nproc=2, lora=lora)
        refuse_beside_pictures(recipe, {"train": row_set}, data.arguments)


PICTURES = said("<image>who?", images=["0.png"])
FORMS: dict[str, dict[str, Any]] = {
    "messages": said("who?"),
    "prompt": {"prompt": PICTURES["messages"][:1], "completion": [ANSWER], "images": ["0.png"]},
    "text pairs": {"prompt": "who?", "completion": "the cat."},
    "text": {"text": "who? the cat."},
    "input_ids": {"input_ids": [1, 2, 3]},
}


@pytest.mark.parametrize("with_pictures", ["train", "eval"])
@pytest.mark.parametrize("form", FORMS)
def test_evaluation_data_of_another_form_than_rows_with_pictures(form: str, with_pictures: str, folder: Path) -> None:
    sets = {with_pictures: [PICTURES], "eval" if with_pictures == "train" else "train": [FORMS[form]]}
    held_out = tiny_run.write_jsonl(folder / "eval.jsonl", sets["eval"])
    if form == "messages":
        assert {*read_set(folder, sets["train"], eval_dataset=str(held_out))[0].sets} == {"train", "eval"}
        return
    with refused("images.forms-differ"):
        read_set(folder, sets["train"], eval_dataset=str(held_out))


@pytest.mark.parametrize("case", READ)
def test_a_fit_plans_the_pictures_of_the_largest_row(case: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def choose(request: Any, max_length: int, *_: Any, **__: Any) -> None:
        asked.append((request, max_length))
        raise UserError("plan.no-layers", "no choice")

    monkeypatch.setattr(fit, "choose", choose)
    row, files = READ[case][0], READ[case][2]
    text = {"instruction": "who?", "output": "the cat."} if "instruction" in row else said("who?")
    with refused("plan.no-layers"):
        fit.fit_recipe(recipe_of(folder, [text, row], fit="8GiB"))
    ((request, max_length),) = asked
    assert request.pictures.tokens == 6 * len(files) < max_length  # of 16 x 24 pixels
    assert request.pictures.values[0] * request.pictures.count == 24 * len(files), "patches of 4 x 4 pixels"


def test_a_fit_plans_unlike_pictures_as_if_each_were_the_largest(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit, "choose", lambda request, *_, **__: pytest.fail(f"{request.pictures}"))
    rows = [chat({**IMAGE, "image": "large.png"}, *[{**IMAGE, "image": "0.png"}] * 3, TEXT),
            chat({**VIDEO, "video": ["0.png"] * 4}, TEXT)]  # fmt: skip
    with pytest.raises(pytest.fail.Exception, match=r"count=2, each=25, .* grid=\(1, 10, 10\)"):  # 25 + 18 tokens
        fit.fit_recipe(recipe_of(folder, rows, fit="8GiB"))


def test_a_fit_of_a_tower_that_no_plan_knows_leaves_settings_as_they_are(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(pictures, "ANY_SIZE", ())
    told: list[str] = []
    recipe = recipe_of(folder, [chat({**IMAGE, "image": "0.png"}, TEXT)], tile=16)
    assert run.fitted(recipe, None, told.append) == recipe.model_copy(update={"fit": False})
    assert len(told) == 1 and "tower" in told[0]
    with refused("images.model-unsupported"):
        run.fitted(recipe.model_copy(update={"fit": True}), None, told.append)


def test_the_size_of_a_picture_is_that_of_its_decoded_form(folder: Path, tmp_path: Path) -> None:
    for orientation in range(1, 9):
        image, exif = Image.new("RGB", (24, 16)), Image.Exif()
        exif[0x0112] = orientation
        image.save(tmp_path / "turned.jpg", exif=exif)
        row = chat({**IMAGE, "image": str(tmp_path / "turned.jpg")}, TEXT)
        sizes = [read(row, folder, decodes=decodes)["sizes"] for decodes in (True, False)]
        assert sizes[0] == sizes[1], orientation


def test_a_fit_of_text_is_made_by_a_model_for_pictures_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def choose(*args: Any, **_: Any) -> None:
        asked.append(args)
        raise UserError("plan.no-layers", "no choice")

    monkeypatch.setattr(fit, "choose", choose)
    for text in (said("who?", images=[]), {"prompt": "who?", "completion": "the cat."}, chat(TEXT), {"text": "who?"}):
        with refused("plan.no-layers"):
            fit.fit_recipe(recipe_of(folder, [text] * 2, fit="8GiB"))
    assert len(asked) == 4


def test_a_model_for_text_takes_no_pictures(folder: Path, tmp_path: Path) -> None:
    tiny_run.save_model(tmp_path / "model")
    row = chat({**IMAGE, "image": str(folder / "0.png")}, TEXT)
    with refused("dataset.no-valid-row", "'image'"):
        read_set(tmp_path, [row])


def test_a_picture_model_without_a_processor_is_named(folder: Path, tmp_path: Path) -> None:
    tiny_run.save_qwen_vl(tmp_path / "model")
    for name in ("processor_config.json",):
        (tmp_path / "model" / name).unlink()
    with refused("model.not-loaded", "processor"):
        processor_of(recipe_of(tmp_path, [said("who?")]))


def test_a_picture_turned_by_its_camera_and_one_of_a_palette(tmp_path: Path) -> None:
    turned = Image.new("RGB", (24, 16), "red")
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / "turned.jpg", exif=exif)
    Image.new("P", (24, 16)).save(tmp_path / "palette.png")
    assert open_picture({"path": str(tmp_path / "turned.jpg"), "bytes": None}).size == (16, 24)
    content = io.BytesIO((tmp_path / "palette.png").read_bytes()).getvalue()
    assert open_picture({"path": None, "bytes": content}).mode == "RGB"


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_the_processors_of_qwen_give_the_tokens_that_are_counted(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torchvision", exc_type=Exception)
    import transformers

    from seqtile.train.picture_batches import count_by_size, picture_collator

    maker, videos = {
        "qwen2_5_vl": (transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor),
        "qwen3_vl": (transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor),
    }[family]
    model = tiny_run.save_qwen_vl(tmp_path / "model", family)
    (model / "processor_config.json").unlink()
    sizes = dict(patch_size=4, merge_size=2, temporal_patch_size=2)
    pictures = transformers.Qwen2VLImageProcessor(**sizes, size={"shortest_edge": 64, "longest_edge": 4096})
    frames = videos(**sizes, size={"shortest_edge": 64, "longest_edge": 65536}, cap_pixels_per_frame=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    maker(pictures, tokenizer, frames, chat_template=tiny_run.PARTS_TEMPLATE).save_pretrained(model)
    rows = tiny_run.picture_rows(tmp_path, pictures=3, videos=1)
    names = [f"video0-{number % 4}.png" for number in range(30)]
    rows.append(chat({**VIDEO, "video": names, "fps": 1}, TEXT))
    data, row_set = read_set(tmp_path, rows, max_length=1024)
    collate = picture_collator(
        data.processor, data.arguments, AutoConfig.from_pretrained(model), pair=False, whole=True
    )
    for row in row_set.rows:
        batch, tokens = collate([row]), count_by_size(row, collate)
        assert tokens is not None
        ids = batch["input_ids"][0].tolist()
        assert (tokens.total, tokens.visual) == (len(ids), sum(token in collate.visual for token in ids))
    assert batch["video_grid_thw"].tolist() == [[15, 4, 6]]
