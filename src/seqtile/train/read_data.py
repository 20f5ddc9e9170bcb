"""Read and check a recipe's rows, and render a sample, before any weight is loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.distributed.fsdp import FSDPModule

from seqtile import __version__
from seqtile._compat import REDUCES_UNUSED
from seqtile._errors import UserError
from seqtile._log import first_rank_logger
from seqtile.models.configs import towers_of
from seqtile.train import demo
from seqtile.train.arguments import trainer_arguments
from seqtile.train.data import SAMPLE_OF_A_FILE, Loaded, load_rows, processes_for
from seqtile.train.load import load_config, processor_of, stop_tokens, tokenizer_of
from seqtile.train.media import PART_COLUMNS, RowError, without_decoding
from seqtile.train.recipe import DEMO, Recipe
from seqtile.train.rendered_rows import RowSet, check_rendered, takes_json_arguments, trained_tokenizer
from seqtile.train.row_formats import COUNTED, MEDIA, RowFormat, find_key_columns
from seqtile.train.stream import Stream
from seqtile.train.trainer_fields import trainer_values

if TYPE_CHECKING:
    from datasets import Dataset
    from trl import SFTConfig  # type: ignore[attr-defined]

logger = first_rank_logger(__name__)


class Data(NamedTuple):
    """The training and evaluation data of a run.

    Attributes:
        arguments: the trainer's.
        sets: ``"train"``, and ``"eval"`` if there is an evaluation.
        stream: where the training rows are from, if they are read while they are trained on.
        processor: the model's, if any row has a picture or a video.
    """

    arguments: SFTConfig
    sets: dict[str, RowSet]
    stream: Stream | None
    processor: Any = None


def read_data(recipe: Recipe, output: Path, stage: Callable[[str], None], *, decodes: bool = True) -> Data:
    """Read and check the rows of ``recipe``.

    Args:
        recipe: resolved.
        output: the run's directory, which the trainer's arguments name; nothing is written.
        stage: called with a description of each stage.
        decodes: decode every picture once, which detects broken files; else read its size alone.

    Raises:
        UserError: invalid rows, or settings under which the rows would be trained otherwise than they say.
    """
    trainer_values(recipe)  # these two checks need no data
    config = load_config(recipe)
    tokenizer = trained_tokenizer(tokenizer_of(recipe), recipe.trainer)
    takes_pictures = "vision" in towers_of(config)
    stops = stop_tokens(recipe, config, tokenizer)
    text_field = recipe.trainer.get("dataset_text_field", "text")
    settings = {
        "text_field": text_field,
        "skip": recipe.skip_bad_rows,
        "assistant_only": bool(recipe.trainer.get("assistant_only_loss")),
        "completion_only": recipe.trainer.get("completion_only_loss"),
        "json_arguments": takes_json_arguments(tokenizer),
    }
    loaded = _load_datasets(recipe, tokenizer, text_field, stage)
    check_settings = {**settings, "media": takes_pictures, "decodes": decodes}
    row_count = 0 if recipe.streaming else len(loaded["train"].rows)
    arguments = trainer_arguments(recipe, output, documents=loaded["train"].documents, rows=row_count)
    stream: Stream | None = None
    sets: dict[str, RowSet] = {}
    for name, source in loaded.items():
        stage(f"checking {source.dataset}")
        if source.dataset == DEMO:
            ids = ("input_ids",)
            row_set = RowSet(source, source.rows, RowFormat(ids, ids), source.rows.select([0]), [0])
        elif recipe.streaming and name == "train":
            stream = Stream(source, **settings)
            row_set = RowSet(source, stream.rows(), stream.row_format, stream.sample(), range(SAMPLE_OF_A_FILE))
        else:
            row_set = check_rows(source, **check_settings)
        sets[name] = row_set
    processor = None
    if any(row_set.media for row_set in sets.values()):
        stage(f"counting the tokens of {recipe.dataset}")
        processor = trained_tokenizer(processor_of(recipe), recipe.trainer)
        refuse_beside_pictures(recipe, sets, arguments)
        arguments.remove_unused_columns = False  # TRL (1.16) keeps no column of videos
    for row_set in sets.values():
        if processor is None:
            row_set.drop_media()
            row_set.sample = check_rendered(row_set, tokenizer, arguments, stops)
            continue
        from seqtile.train.picture_batches import count_tokens, picture_collator

        collator = picture_collator(processor, arguments, config, pair=row_set.row_format.is_pair, whole=True)
        row_set.sample = check_rendered(row_set, processor.tokenizer, arguments, stops, collator)
        row_set.summary = count_tokens(row_set, collator, arguments.max_length, skip=recipe.skip_bad_rows)
    return Data(arguments, sets, stream, processor)


def _load_datasets(recipe: Recipe, tokenizer: Any, text_field: str, stage: Callable[[str], None]) -> dict[str, Loaded]:
    """The unchecked rows of ``"train"``, and of ``"eval"`` if there is an evaluation."""
    loaded: dict[str, Loaded] = {}
    for name, dataset, key, split, config in (
        ("train", recipe.dataset, "dataset_split", recipe.dataset_split, recipe.dataset_config),
        ("eval", recipe.eval_dataset, "eval_split", recipe.eval_split, recipe.eval_config),
    ):
        streaming = recipe.streaming and name == "train"
        if dataset == DEMO:
            loaded[name] = Loaded(DEMO, demo.demo_rows(tokenizer, recipe.max_length))
        elif dataset is not None:
            stage(f"reading {dataset}")
            loaded[name] = load_rows(
                dataset, key=key, split=split, config=config, text_field=text_field, streaming=streaming
            )
    return loaded


def refuse_beside_pictures(recipe: Recipe, sets: Mapping[str, RowSet], arguments: SFTConfig) -> None:
    """Refuse settings under which rows with pictures would lose them, or ranks would wait for each other.

    Raises:
        UserError: with what to change.
    """
    if arguments.packing or arguments.padding_free:
        raise UserError("images.with-packing", "packed rows would lose their pictures; drop packing")
    if recipe.streaming:
        raise UserError(
            "images.with-streaming",
            "rows with pictures cannot be streamed, but their files are read as they train; drop streaming",
        )
    first, *others = (row_set.rows.features for row_set in sets.values())
    if any(features.get(name) != first.get(name) for features in others for name in ("sizes", "messages", "prompt")):
        forms = " and ".join(", ".join(row_set.row_format.key_columns) for row_set in sets.values())
        raise UserError(
            "images.forms-differ",
            f"with pictures the training and the evaluation data need the same form, got {forms}; write both as "
            "'messages', or both as 'prompt' and 'completion' of messages",
        )
    for row_set in sets.values():
        # TRL's collator (1.16) reads none of these, also in rows of text among those with pictures.
        for column in {"tools", "chat_template_kwargs", COUNTED} & {*row_set.rows.column_names}:
            index = next((index for index, value in enumerate(row_set.rows[column][:]) if value), None)
            if index is not None:
                number = index if row_set.numbers is None else row_set.numbers[index]
                raise UserError(
                    "images.column-unsupported",
                    f"dataset {row_set.source.dataset!r}, {row_set.source.place(number)}: "
                    f"{'a message left out of the loss' if column == COUNTED else repr(column)} is not supported in "
                    "data with pictures; write tools into the system message, or train such rows without pictures",
                )
    videos = {bool(size) for row_set in sets.values() for sizes in row_set.rows["sizes"][:] for size in sizes["video"]}
    if len(videos) > 1:
        raise UserError(
            "images.videos-mixed",
            "some videos are files and some are lists of frames, which no processor takes together; use one",
        )
    if recipe.split > 1:
        raise UserError(
            "images.with-sequence-parallel",
            "rows with pictures cannot be split over processes; drop sp_size and cp_size",
        )
    # A tower that trains has no gradients to reduce on a rank without a picture; all-linear leaves it out.
    trains_tower = recipe.lora is None or recipe.lora.target_modules != "all-linear"
    reduces_unused = recipe.engine == "ddp" or (recipe.engine == "fsdp2" and hasattr(FSDPModule, REDUCES_UNUSED))
    if (recipe.nproc or 1) > 1 and (recipe.engine == "zero3" or (trains_tower and not reduces_unused)):
        for row_set in sets.values():
            if len(row_set.media) > 1:
                raise UserError(
                    "images.mixed-rows",
                    f"dataset {row_set.source.dataset!r} has rows with pictures and rows without, or with videos, so "
                    "the vision tower would not run as often on every rank, and the ranks would wait for each other; "
                    "use rows of one kind, --engine ddp, or --engine fsdp2 with PyTorch 2.13 or newer",
                )


def check_rows(source: Loaded, *, text_field: str = "text", skip: bool = False, **settings: Any) -> RowSet:
    """Check every row, in parallel where there are many; datasets caches what came of rows that lie on disk.

    Args:
        source: what :func:`seqtile.train.data.load_rows` gave.
        text_field: name of the text column.
        skip: leave rows out that nothing can be trained on, instead of refusing them.
        **settings: fields of :class:`seqtile.train.row_formats.RowFormat`.

    Raises:
        UserError: the first row that is wrong; or, with ``skip``, that no other is there.
    """
    from datasets import Features, Value

    rows, dataset = source.rows, source.dataset
    key_columns = find_key_columns(rows.column_names, dataset, text_field)
    row_format = RowFormat(key_columns, tuple(rows.column_names), folder=source.folder, **settings)
    if row_format.takes_media:
        rows = rows.cast(without_decoding(rows.features))
    else:
        _refuse_media(rows, dataset)
    unused = [name for name in rows.column_names if name not in row_format.used]
    if unused:
        logger.info("dataset %s: unused columns: %s", dataset, ", ".join(unused))
    text_pairs = isinstance(rows.features.get("prompt"), Value)
    results = rows.select_columns(list(row_format.used)).map(
        _read_rows, batched=True, remove_columns=list(row_format.used), num_proc=processes_for(len(rows)),
        features=Features({**row_format.features(text_pairs=text_pairs), "problem": Value("string")}),
        fn_kwargs={"row_format": row_format, "version": __version__}, desc="Checking rows",
        load_from_cache_file=None if not row_format.takes_media else False,  # files may have gone since
    )  # fmt: skip
    problems = results["problem"][:]
    results = results.remove_columns("problem")
    good = [index for index, problem in enumerate(problems) if not problem]
    if len(good) < len(rows):
        bad = next(index for index, problem in enumerate(problems) if problem)
        first = f"dataset {dataset!r}, {source.place(bad)}: {problems[bad]}"
        if not good:
            raise UserError("dataset.no-valid-row", f"{first}; none of the {len(rows):,} rows can be trained on")
        if not skip:
            raise UserError(
                "dataset.invalid-row",
                f"{first} ({len(rows) - len(good):,} of {len(rows):,} rows are invalid); fix it, or skip such rows "
                "with --skip-bad-rows",
            )
    sampled = [index for index in source.sample() if not problems[index]] or good[:1]
    left_out = dict(Counter(problem for problem in problems if problem))
    rows = results.select(good) if left_out else results
    return RowSet(source, rows, row_format, results.select(sampled), sampled, left_out, good if left_out else None)


def _read_rows(batch: Mapping[str, Sequence[Any]], row_format: RowFormat, version: str) -> dict[str, list[Any]]:
    """Each row in TRL's columns, or what is wrong with it. A new ``version`` reads cached rows again."""
    results: list[dict[str, Any]] = []
    for values in zip(*batch.values(), strict=True):
        try:
            results.append(row_format.read(dict(zip(batch, values, strict=True))))
        except RowError as error:
            results.append({"problem": str(error)})
    return {name: [result.get(name) for result in results] for name in (*row_format.outputs, "problem")}


def _refuse_media(rows: Dataset, dataset: str) -> None:
    """Refuse pictures beside the text, which would be dropped."""
    if (name := _filled_column(rows)) is not None:
        raise UserError(
            "dataset.media-column-in-text",
            f"dataset {dataset!r} has a column {name!r} that is not empty, but this model, or this kind of rows, "
            "takes text only; drop the column, or use a model for pictures and rows of 'messages'",
        )


def _filled_column(rows: Dataset) -> str | None:
    """A column of pictures, videos or sounds that has any."""
    from pyarrow import compute, types  # type: ignore[import-untyped]

    for name in set(MEDIA) & set(rows.column_names):
        column = rows.data.column(name)
        if types.is_list(column.type):
            lengths = compute.list_value_length(column)
            column = lengths.filter(compute.greater(lengths, 0))
        if column.null_count < len(column):
            return name
    return None


def has_media(recipe: Recipe) -> bool:
    """Whether a training row has a picture or a video; no file is opened, and rows of text are read to the end."""
    if recipe.streaming or recipe.dataset == DEMO:
        return False
    rows = load_rows(recipe.dataset, split=recipe.dataset_split, config=recipe.dataset_config).rows
    chats = [name for name in ("messages", "conversations", "prompt") if name in rows.column_names]
    return _filled_column(rows) is not None or any(
        isinstance(part, Mapping) and part.get("type") in PART_COLUMNS
        for row in rows.select_columns(chats)
        for chat in row.values()
        for message in (chat if isinstance(chat, list) else ())
        for parts in message.values()
        for part in (parts if isinstance(parts, list) else ())
    )
