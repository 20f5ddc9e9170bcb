"""The options of tiling: declared once, with one vocabulary, wherever they are given.

:class:`TilingOptions` is what :func:`seqtile.apply` does to a model. A recipe, a plan's request and its steps hold one;
the recipe's keys, those of axolotl's ``seqtile:`` section and the command line's flags are made from its fields, each
of which says beside its default how it is written there (:class:`Declaration`). A new option is one field here and an
argument of :func:`seqtile.apply`, whose docstring says what each of them means.

Two names outside are not fields: ``tiled_mlp: false`` (recipes, axolotl) and ``--tile none`` (``seqtile plan``) are
``blocks="none"``. Nothing here imports torch.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, TypeVar, get_args, get_type_hints

from seqtile._errors import UserError
from seqtile.tiling import KeepRule, TileRule, parse_bytes, parse_keep, parse_tile

Only = str | Sequence[str] | Callable[[str, Any], bool]

WHOLE_LAYER = "mlp+norm+projections"
BLOCKS = ("auto", "mlp", "mlp+norm", WHOLE_LAYER, "none")
PATHS = ("auto", "fused", "generic")
LOSS_KERNELS = ("torch", "native", "liger", "cce", "quack", "auto")
CHECKPOINT_POLICIES = ("layer", "attention-saved")
"""What activation checkpoints save. ``"auto"`` is for plans; ``"none"`` is None: checkpointing is not changed.

:func:`layer_policies` reads a value that differs by layer."""

WITH_FLAGS = ("train", "plan")
"""Commands with a flag for an option, by default."""


@dataclass(frozen=True)
class Declaration:
    """How an option is written by users.

    Attributes:
        help: one phrase for ``--help``, without a full stop.
        commands: commands that have a flag for it.
        recipe: whether it is a key of a recipe.
        plan: whether plans depend on it.
        choices: the words that are its only values; empty if there are others.
        flag_values: the flag's words in place of ``choices``, and the value of each.
        other_text: a character by which the flag takes other text too, which the record checks.
        metavar: the flag's value in ``--help``.
        least: smallest number.
        flag: type of the flag where it is narrower than text.
        file: type in a file where it is not that of the field.
    """

    help: str
    commands: tuple[str, ...] = WITH_FLAGS
    recipe: bool = True
    plan: bool = True
    choices: tuple[str, ...] = ()
    flag_values: Mapping[str, Any] | None = None
    other_text: str = ""
    metavar: str | None = None
    least: int | None = None
    flag: type | None = None
    file: Any = None


def option(default: Any, help: str, **how: Any) -> Any:
    """A field of :class:`TilingOptions`; ``how`` are the other fields of :class:`Declaration`."""
    return field(default=default, metadata={"written": Declaration(help, **how)})


@dataclass(frozen=True)
class TilingOptions:
    """The arguments of :func:`seqtile.apply`, which documents them; each value is checked when the record is made.

    Which of them exclude each other depends on who uses them, and is checked there.

    Raises:
        UserError: an invalid value.
    """

    tile: int | str = option(
        "auto", "Tokens per tile, or a rule: auto, shards:N, arctic, memory:1GiB",
        commands=(*WITH_FLAGS, "verify"),
    )  # fmt: skip
    only: Only | None = option(
        None, "Blocks to tile: names or patterns", commands=(), plan=False, file=str | list[str] | None
    )
    trust: Only | None = option(
        None, "Blocks to tile without tracing them", commands=(), plan=False, file=str | list[str] | None
    )
    blocks: str = option(
        "auto", f"Modules to tile: auto, mlp, mlp+norm or {WHOLE_LAYER}", commands=("train", "plan"), choices=BLOCKS,
        flag_values={word: word for word in BLOCKS if word != "none"},
    )  # fmt: skip
    path: str = option("auto", "Operator: auto, fused or generic", commands=(), recipe=False, plan=False, choices=PATHS)
    keep: float | str = option(0.0, "Fraction of tiles whose gate and up are saved, or memory:4GiB")
    loss: str | None = option(
        None, "LM head and loss: tiled or full", choices=("tiled",),
        flag_values={"tiled": "tiled", "full": None},
    )  # fmt: skip
    loss_tile: int | str = option("auto", "Tokens per tile of the LM head", metavar="N", least=1, flag=int)
    loss_impl: str = option("torch", "Kernel of the loss", commands=(), recipe=False, plan=False, choices=LOSS_KERNELS)
    checkpoint: str | None = option(
        None, "Checkpointing: layer, attention-saved, none, or by layer: none:4+attention-saved",
        flag_values={**{word: word for word in ("auto", *CHECKPOINT_POLICIES)}, "none": None}, other_text=":",
    )  # fmt: skip
    offload: bool | str = option(
        False, "To host memory: checkpoints, 64GB (of them), weights (frozen), or checkpoints+weights", commands=()
    )
    heads: int | str | None = option(
        None, "Key-value heads per pass of attention (default all)", commands=("train", "plan"), metavar="N", least=1,
        flag=int, file=int | Literal["auto"] | None,
    )  # fmt: skip
    state: int | str | None = option(
        None, "Tokens per tile of layers with a state, or auto (default not tiled)", commands=("train", "plan"),
        file=int | Literal["auto"] | None,
    )  # fmt: skip

    chunk: int | str | None = option(
        None, "Tokens per chunk of decoder layers, or auto (default whole)", commands=("train", "plan"),
        file=int | Literal["auto"] | None,
    )  # fmt: skip
    segment: int = option(
        1, "Decoder layers that run on a chunk together", commands=("train", "plan"), metavar="N", least=1
    )
    vision: int | str | None = option(
        None, "Frames or pictures per group of the vision tower, or auto (default whole)", commands=("train", "plan"),
        file=int | Literal["auto"] | None,
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("only", "trust"):
            value = getattr(self, name)
            if not _is_only(value):
                raise UserError(
                    "only.wrong-type",
                    f"got {name}={value!r}, expected a block's name or pattern, a list of them, or a function of "
                    "(name, module)",
                )
            if value is not None and not isinstance(value, str) and not callable(value):
                object.__setattr__(self, name, tuple(value))  # so that records can be compared and hashed
        _one_of("blocks", self.blocks, BLOCKS)
        _one_of("path", self.path, PATHS)
        for name in ("tile", "state", "chunk", "vision"):
            value = getattr(self, name)
            if isinstance(value, str) and value.strip().isdecimal():  # a flag's
                object.__setattr__(self, name, int(value))
        try:
            self.tile_rule, self.keep_rule(1)
        except (TypeError, ValueError) as error:
            raise UserError("option.malformed", str(error)) from None
        if self.loss not in (None, "tiled"):
            raise UserError("option.unknown-choice", f"got loss={self.loss!r}, expected 'tiled' or None")
        _one_of("loss_impl", self.loss_impl, LOSS_KERNELS)
        if self.checkpoint not in (None, "auto"):
            object.__setattr__(self, "checkpoint", _write_checkpoint(_read_checkpoint(self.checkpoint)))
        if self.offload == "checkpoints":
            object.__setattr__(self, "offload", True)
        self._offload  # noqa: B018
        try:
            self.loss_rule  # noqa: B018
        except (TypeError, ValueError) as error:
            raise UserError("option.malformed", str(error).replace("tile=", "loss_tile=", 1)) from None
        for name in ("heads", "vision"):
            value = getattr(self, name)
            if value not in (None, "auto") and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(
                    "option.not-a-count", f"got {name}={value!r}, expected 'auto', an int of at least 1, or None"
                )
        for name in ("state", "chunk"):
            value = getattr(self, name)
            if value not in (None, "auto") and (isinstance(value, bool) or not isinstance(value, int) or value < 2):
                raise UserError(
                    "option.not-a-count", f"got {name}={value!r}, expected 'auto', an int of at least 2, or None"
                )
        if isinstance(self.segment, bool) or not isinstance(self.segment, int) or self.segment < 1:
            raise UserError("option.not-a-count", f"got segment={self.segment!r}, expected an int of at least 1")

    @property
    def tiled(self) -> bool:
        """Whether any block runs in tiles."""
        return self.blocks != "none"

    @property
    def beside_blocks(self) -> bool:
        """Whether anything is asked for that is not about blocks."""
        asked = (self.loss, self.checkpoint, self.offload, self.heads, self.state, self.chunk, self.vision)
        return any(asked)

    @property
    def by_layer(self) -> bool:
        """Whether ``checkpoint`` differs by layer."""
        return by_layer(self.checkpoint)

    @property
    def saves_attention(self) -> bool:
        """Whether the checkpoint of some layer keeps attention's output."""
        return saves_attention(self.checkpoint)

    @cached_property
    def tile_rule(self) -> TileRule:
        """``tile``, parsed."""
        return parse_tile(self.tile)

    @cached_property
    def loss_rule(self) -> TileRule:
        """``loss_tile``, parsed."""
        return parse_tile(self.loss_tile)

    def keep_rule(self, blocks: int) -> KeepRule:
        """``keep``, parsed, for each of ``blocks`` blocks."""
        return parse_keep(self.keep, blocks)

    @property
    def offload_room(self) -> bool | int:
        """Whether checkpoints wait on the host, or the bytes that they may take there."""
        return self._offload[0]

    @property
    def weights_on_host(self) -> bool:
        """Whether frozen weights of decoder layers wait on the host."""
        return self._offload[1]

    @property
    def checkpoints_on_host(self) -> bool | str:
        """``offload`` of checkpoints alone: False, True or the size that bounds them, as written."""
        if isinstance(self.offload, bool) or self.offload_room in (True, False):
            return bool(self.offload_room)
        return next(word.strip() for word in self.offload.split("+") if word.strip() != "weights")

    @cached_property
    def _offload(self) -> tuple[bool | int, bool]:
        if isinstance(self.offload, bool):
            return self.offload, False
        words = [word.strip() for word in self.offload.split("+")] if isinstance(self.offload, str) else [""]
        of_checkpoints: list[bool | int] = [
            word == "checkpoints" or parse_bytes(word) or 0 for word in words if word != "weights"
        ]
        if len(of_checkpoints) > 1 or len(words) > 2 or not all(of_checkpoints):
            raise UserError(
                "offload.malformed",
                f"got offload={self.offload!r}, expected True or 'checkpoints', a size for them such as '64GB', "
                "'weights', or both: 'checkpoints+weights'",
            )
        return of_checkpoints[0] if of_checkpoints else False, "weights" in words

    def without_blocks(self) -> TilingOptions:
        """The options for a model whose blocks stay untiled: those that only concern blocks are at their defaults."""
        return replace(self, blocks="none", **{name: DEFAULTS[name] for name in OF_BLOCKS})

    def for_plan(self) -> TilingOptions:
        """The options with those that no plan depends on at their defaults."""
        return replace(self, **{name: DEFAULTS[name] for name, how in WRITTEN.items() if not how.plan})


CheckpointRun = tuple[str | None, int | None]
"""The policy of some layers in a row, None without checkpoints; how many layers, None for all others."""


def layer_policies(checkpoint: str | None, layers: int) -> tuple[str | None, ...]:
    """What each layer's activation checkpoint saves, the first layer first; None for a layer that has none.

    A value that differs by layer counts from the last layer on, whose backward comes first, so that what it keeps is
    released first: ``"none:4+attention-saved:20"``. The last word may be without a count: ``"none:4+attention-saved"``.
    The layers that are left have ``"layer"``. Counts beyond ``layers`` are cut.
    """
    policies: list[str | None] = []
    for policy, count in _read_checkpoint(checkpoint):
        policies += [policy] * min(layers - len(policies), layers if count is None else count)
    return tuple(reversed([*policies, *["layer"] * (layers - len(policies))]))


def by_layer(checkpoint: str | None) -> bool:
    """Whether ``checkpoint`` differs by layer."""
    return checkpoint is not None and ":" in checkpoint


def saves_attention(checkpoint: str | None) -> bool:
    """Whether ``checkpoint`` keeps attention's output in some layer."""
    return checkpoint is not None and "attention-saved" in checkpoint


def checkpoint_of(policies: Sequence[str | None]) -> str | None:
    """The option ``checkpoint`` whose :func:`layer_policies` are ``policies``."""
    if len({*policies}) == 1:
        return policies[0]
    return _write_checkpoint(_read_checkpoint("+".join(f"{policy or 'none'}:1" for policy in reversed(policies))))


def check_layers(checkpoint: str | None, layers: int, model: str) -> None:
    """Refuse counts of ``checkpoint`` beyond the ``layers`` of ``model``.

    Raises:
        UserError: with both numbers.
    """
    counted = sum(count or 0 for _, count in _read_checkpoint(checkpoint))
    if counted > layers:
        raise UserError(
            "checkpoint.layer-count", f"checkpoint {checkpoint!r} counts {counted} layers, but {model} has {layers}"
        )


def _read_checkpoint(text: str | None) -> list[CheckpointRun]:
    """The runs of ``checkpoint`` from the last layer on, as few as possible."""
    runs: list[CheckpointRun] = []
    words = ["none"] if text is None else text.split("+") if isinstance(text, str) else [""]
    for number, word in enumerate(words):
        name, colon, count = (part.strip() for part in word.partition(":"))
        last = number == len(words) - 1
        if name not in (*CHECKPOINT_POLICIES, "none") or not (count.isdecimal() if colon else last):
            names = ", ".join(map(repr, CHECKPOINT_POLICIES))
            raise UserError(
                "checkpoint.malformed",
                f"got checkpoint={text!r}, expected one of {names}, 'none', or None; or numbers of layers from the "
                "last one on, such as 'none:4+attention-saved:20'",
            )
        policy = None if name == "none" else name
        if count == "" or int(count):
            before = runs.pop() if runs and runs[-1][0] == policy else (policy, 0)
            runs.append((policy, int(count) + (before[1] or 0) if count else None))
    return runs[:-1] if runs and runs[-1][0] == "layer" else runs


def _write_checkpoint(runs: Sequence[CheckpointRun]) -> str | None:
    """The normal form of ``checkpoint`` with these layers."""
    words = [f"{policy or 'none'}{'' if count is None else f':{count}'}" for policy, count in runs]
    return None if words == ["none"] else "+".join(words) or "layer"


def offload_of(checkpoints: bool | str, weights: bool) -> bool | str:
    """The option ``offload`` for checkpoints (a size bounds them) and frozen weights on the host."""
    if not weights:
        return checkpoints
    return f"{'checkpoints' if checkpoints is True else checkpoints}+weights" if checkpoints else "weights"


def _is_only(value: object) -> bool:
    if value is None or isinstance(value, str) or callable(value):
        return True
    return isinstance(value, Sequence | set | frozenset) and all(isinstance(entry, str) for entry in value)


def _one_of(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UserError(
            "option.unknown-choice", f"got {name}={value!r}, expected one of {', '.join(map(repr, choices))}"
        )


def _fields() -> tuple[Field[Any], ...]:
    return fields(TilingOptions)


WRITTEN: dict[str, Declaration] = {option.name: option.metadata["written"] for option in _fields()}
"""How each option is given."""

DEFAULTS: dict[str, Any] = {option.name: option.default for option in _fields()}
"""The value of each option that is not given."""

OF_BLOCKS = ("tile", "only", "trust", "path", "keep")
"""Options without effect where no block is tiled."""


def unknown_keys(keys: Iterable[str]) -> str:
    """A message about unknown keys, with the closest and all valid ones, or ""."""
    if not (unknown := [key for key in keys if key not in DEFAULTS]):
        return ""
    nearest = difflib.get_close_matches(str(unknown[0]), DEFAULTS, n=1)
    meant = f"; did you mean {nearest[0]}?" if nearest else "."
    return f"unknown keys: {', '.join(map(repr, unknown))}{meant} Keys: {', '.join(DEFAULTS)}"


def file_type(name: str, *, choices: bool) -> Any:
    """The type of an option's value in a file.

    Args:
        name: name of the option.
        choices: as a ``Literal``, so that a file's schema refuses another word; else as text.
    """
    how, hint = WRITTEN[name], get_type_hints(TilingOptions)[name]
    if how.choices and choices:
        literal: Any = Literal.__getitem__(how.choices)
        return literal | None if type(None) in get_args(hint) else literal
    return hint if how.file is None else how.file


def flag_type(name: str) -> type:
    """The type of an option's flag: text wherever the option takes words."""
    how, hint = WRITTEN[name], get_type_hints(TilingOptions)[name]
    candidates = [candidate for candidate in get_args(hint) or (hint,) if candidate is not type(None)]
    return how.flag or (str if str in candidates else candidates[0])


def from_flag(name: str, text: Any) -> Any:
    """The value of a flag's text.

    Raises:
        UserError: an unknown word.
    """
    flag_values = WRITTEN[name].flag_values
    if flag_values is None:
        if float in get_args(get_type_hints(TilingOptions)[name]):
            with suppress(ValueError):
                return float(text)
        return text
    if text not in flag_values:
        if (mark := WRITTEN[name].other_text) and mark in text:
            return text
        raise UserError("option.unknown-choice", f"got {name} {text!r}, expected one of {', '.join(flag_values)}")
    return flag_values[text]


def to_flag(name: str, value: Any) -> Any:
    """The flag's word for ``value``; the value itself where the flag has no words."""
    flag_values = WRITTEN[name].flag_values or {}
    return next((word for word, meant in flag_values.items() if meant == value), value)


Record = TypeVar("Record")


def changed(record: Record, **changes: Any) -> Record:
    """A frozen record that holds ``options``, with fields of either changed.

    Args:
        record: a dataclass with a field ``options``.
        **changes: fields of the record, or options.
    """
    names = {entry.name for entry in fields(record)}  # type: ignore[arg-type]
    inside = {name: changes.pop(name) for name in [*changes] if name in DEFAULTS and name not in names}
    options = replace(changes.pop("options", record.options), **inside)  # type: ignore[attr-defined]
    return replace(record, options=options, **changes)  # type: ignore[type-var]
