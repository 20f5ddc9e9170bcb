"""A combination of settings that cannot run is refused, with the same sentence through every door."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from transformers import LlamaConfig

from seqtile import UserError, rules
from seqtile.install.apply import apply_options
from seqtile.integrations import ms_swift
from seqtile.integrations.axolotl_checks import check_settings
from seqtile.integrations.callback import _check_trainer
from seqtile.options import DEFAULTS, TilingOptions
from seqtile.planner.accelerators import find_device
from seqtile.planner.request import Request, check_request, check_request_combination
from seqtile.planner.step_config import Lora
from seqtile.rules import RULES, Combination, ModelFacts, refused
from seqtile.train.recipe import build_recipe, resolve

TILED_LOSS = {"loss": "tiled"}


def combination(options: dict[str, Any] | None = None, **settings: Any) -> Combination:
    return Combination(TilingOptions(**(options or {})), **settings)


RING, ULYSSES = {"engine": "fsdp2", "cp_size": 2}, {"engine": "zero3", "sp_size": 2}

REFUSED: list[tuple[Combination, str]] = [
    (combination({"blocks": "none", "keep": 0.5, "checkpoint": "layer"}), "keep would be ignored"),
    (combination({"chunk": 64, "keep": 0.5}), "keep would save gate and up of every chunk"),
    (combination({"loss_tile": 512}), "loss_tile needs loss 'tiled'"),
    (combination({"checkpoint": "auto"}), "is for plans"),
    (combination({"offload": True}, recomputes=False), "need activation checkpointing, which is off"),
    (combination(TILED_LOSS, framework="ms-swift"), "not verified with ms-swift"),
    (combination({"segment": 2}), "segment needs chunk"),
    (combination({"chunk": 64, "heads": 1}), "chunk and heads both bound"),
    (combination({"chunk": 64, "checkpoint": "attention-saved"}), "'attention-saved' both bound"),
    (combination({"chunk": 64, "checkpoint": "none:2"}), "'none:2' both bound"),
    (combination({"chunk": 64, "segment": 2}, engine="fsdp2"), "engine 'fsdp2' has on the device one layer at a time"),
    (
        combination({"chunk": 64, "segment": 2, "offload": "weights"}, adapters=True),
        "offload 'weights' has on the device one layer",
    ),
    (combination({"chunk": 64}, **RING), "does not support chunk 64"),
    (combination({"path": "fused"}, mlp_kernels=("lora_mlp_kernel",)), "lora_mlp_kernel both replace"),
    (combination(TILED_LOSS, losses=("cut_cross_entropy",)), "both compute the loss"),
    (combination({"offload": True}, checkpointers=("activation_offloading",)), "what activation checkpoints keep"),
    (combination(product_savers=("selective_checkpointing.save: aten::mm",)), "save: aten::mm saves the products"),
    (combination({"offload": True}, offloaders=("trainer.activation_offloading",)), "both offload activations"),
    (combination(engine="single", processes=2), "one process, got 2"),
    (combination(engine="ddp", processes=1), "at least 2 processes"),
    (combination(engine="zero3", processes=8, nodes=3), "expected a multiple of 3"),
    (combination(engine="ddp", processes=2, engine_offload=("optimizer",)), "got 'ddp'"),
    (combination(engine="zero2", engine_offload=("weights",)), "use zero3 or fsdp2"),
    (combination(engine="fsdp2", engine_offload=("optimizer",)), "weights and optimizer together"),
    (combination({"offload": "weights"}, engine="zero3", adapters=True), "needs engine 'single'"),
    (combination({"offload": "weights"}, engine="single"), "every weight trains"),
    (combination(engine="fsdp2", trainer={"save_on_each_node": True}), "no complete checkpoint on any node"),
    (combination({"checkpoint": "attention-saved"}, engine="single", attention="eager"), "needs an attention kernel"),
    (combination({"checkpoint": "attention-saved"}, engine="zero3", adapters=True), "DeepSpeed 0.19.4"),
    (combination({"checkpoint": "none:1+attention-saved:2"}, **RING), "does not support ring attention"),
    (combination(engine="fsdp2", sp_size=2, cp_size=2), "got both cp_size"),
    (combination(engine="zero3", cp_size=2), "needs engine fsdp2"),
    (combination(engine="zero2", sp_size=2), "gradients 2 times too large"),
    (combination(engine="fsdp2", sp_size=2), "needs engine zero3"),
    (combination(engine="single", processes=1, sp_size=2), "needs engine zero3"),
    (combination(**ULYSSES, processes=3), "got 3 processes, expected a multiple of"),
    (combination(**RING, processes=3), "got 3 processes, expected a multiple of"),
    (combination(**ULYSSES, max_length=65), "use --max-length 64"),
    (combination(**RING, max_length=66), "use --max-length 64"),
    (combination(**ULYSSES, trainer={"pad_to_multiple_of": 3}), "multiple of 2"),
    (combination(**RING, trainer={"pad_to_multiple_of": 2}), "multiple of 4"),
    (combination(**RING, attention="eager"), "PyTorch's attention"),
    *((combination(**RING, packing=packing), "has no document masks") for packing in (True, "wrapped")),
    *((combination(**RING, trainer={key: True}), "has no document masks") for key in ("padding_free", "eval_packing")),
    *((combination(**ULYSSES, packing=packing), "attend to each other") for packing in (True, "bfd")),
    *(
        (combination(**ULYSSES, trainer={key: True}), "attend to each other")
        for key in ("padding_free", "eval_packing")
    ),
    (combination(**RING, trainer={"label_smoothing_factor": 0.1}), "shifts the labels"),
    (combination({"heads": 1}, **RING), "ring attention runs all heads at once"),
]

ALLOWED = [
    combination(),
    combination(**ULYSSES, processes=4, max_length=64, packing="wrapped"),
    combination(**RING, processes=4, max_length=64, packing=False),
    combination({"blocks": "none", "checkpoint": "layer"}),
    combination({"checkpoint": "attention-saved"}, engine="fsdp2", adapters=True, attention="sdpa"),
    combination(engine="fsdp2", engine_offload=("optimizer", "weights")),
    combination({"offload": "weights"}, recomputes=False, offloaders=("trainer.activation_offloading",)),
    combination({"offload": "checkpoints+weights"}, engine="single", adapters=True),
    combination({"blocks": "none", "loss": "tiled"}, product_savers=("selective_checkpointing.save: aten::mm",)),
    combination({"path": "fused", **TILED_LOSS}, checkpointers=("selective_checkpointing",)),
]


def train(asked: Combination) -> None:
    values = {
        "model": "m", "dataset": "d", "max_length": asked.max_length or 64, "engine": asked.engine,
        "nproc": asked.processes, "sp_size": asked.sp_size, "cp_size": asked.cp_size, "packing": asked.packing,
        "engine_offload": [*asked.engine_offload],
        "lora": {"r": 4} if asked.adapters else None, "tiled_mlp": asked.options.tiled,
        "trainer": dict(asked.trainer) | ({"activation_offloading": True} if asked.offloaders else {}),
        "attention": asked.attention,
    }  # fmt: skip
    options = {name: getattr(asked.options, name) for name in ("keep", "heads", "offload", "chunk", "segment")}
    options["checkpoint"] = asked.options.checkpoint or "layer" if asked.recomputes else "none"
    resolve(build_recipe({**values, **options}, {})[0])


def plan(asked: Combination) -> None:
    adapters = Lora() if asked.adapters else None
    options = asked.options
    if asked.recomputes and options.checkpoint is None:
        options = replace(options, checkpoint="layer")
    request = Request(
        "m", LlamaConfig(), find_device("h100"), options=options, engine=str(asked.engine), lora=adapters,
        gpus=asked.processes or asked.sp_size * asked.cp_size * (2 if asked.engine == "ddp" else 1),
        nodes=asked.nodes, sp_size=asked.sp_size, cp_size=asked.cp_size, engine_offload=asked.engine_offload,
        attention=asked.attention or "sdpa",
    )  # fmt: skip
    check_request(request, asked.max_length)
    check_request_combination(request, asked.max_length)


def given_options(asked: Combination) -> dict[str, Any]:
    return {name: getattr(asked.options, name) for name in DEFAULTS if getattr(asked.options, name) != DEFAULTS[name]}


def axolotl(asked: Combination) -> None:
    others = {key: True for key in (*asked.mlp_kernels, *asked.losses, *asked.checkpointers)}
    check_settings({"seqtile": given_options(asked), **others})


def swift(asked: Combination) -> None:
    ms_swift.settings(SimpleNamespace(callbacks=[]), [ms_swift.FLAG, json.dumps(given_options(asked))], None)


def callback(asked: Combination) -> None:
    parallelism = SimpleNamespace(sp_size=asked.sp_size, cp_size=asked.cp_size)
    arguments = SimpleNamespace(**asked.trainer, packing=bool(asked.packing), packing_strategy=asked.packing)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(parallelism_config=parallelism), args=arguments)
    _check_trainer(trainer, nn.Linear(4, 4), asked.options)  # type: ignore[arg-type]


LAUNCH = {"options", "engine", "processes", "sp_size", "cp_size", "engine_offload", "adapters", "attention",
          "recomputes", "max_length"}  # fmt: skip
DOORS: dict[str, tuple[Callable[[Combination], None], set[str]]] = {
    "train": (train, LAUNCH | {"packing", "trainer", "offloaders"}),
    "plan": (plan, LAUNCH | {"nodes"}),
    "apply": (lambda asked: apply_options(nn.Linear(4, 4), asked.options) and None, {"options"}),
    "axolotl": (axolotl, {"options", "mlp_kernels", "losses", "checkpointers"}),
    "ms-swift": (swift, {"options", "framework"}),
    "callback": (callback, {"options", "engine", "sp_size", "cp_size", "packing", "trainer"}),
}
"""How each door is asked for a combination, and the fields that can be said there."""


def of_doors() -> list[Any]:
    cases = []
    for asked, words in REFUSED:
        said = {
            field.name for field in fields(asked) if getattr(asked, field.name) != getattr(Combination(), field.name)
        }
        for name, (door, takes) in DOORS.items():
            needs_engine = name in ("train", "plan") and asked.engine is None
            is_loss = name == "train" and {*given_options(asked)} & {"loss", "loss_tile", "path"}
            chooses = name in ("train", "plan") and asked.options.checkpoint == "auto"
            if said <= takes and not (is_loss or chooses):
                case = replace(asked, engine="single") if needs_engine else asked
                case = replace(case, framework="ms-swift") if name == "ms-swift" else case
                case = replace(case, engine=None) if name == "callback" else case
                if refused(case) is None:  # the callback does not see the engine
                    continue
                cases.append(pytest.param(door, case, id=f"{name}-{words}"))
    return cases


@pytest.fixture(autouse=True)
def old_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "package_version", lambda _: "0.19.3")


@pytest.mark.parametrize(("asked", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_refused(asked: Combination, words: str) -> None:
    sentence = refused(asked)
    assert sentence is not None and words in sentence and "\n" not in sentence


@pytest.mark.parametrize(("door", "asked"), of_doors())
def test_every_door_refuses_it_with_the_same_sentence(door: Callable[[Combination], None], asked: Combination) -> None:
    with pytest.raises(UserError) as caught:
        door(asked)
    assert str(caught.value).removeprefix("--seqtile: ") == refused(asked)


@pytest.mark.parametrize("asked", ALLOWED)
def test_allowed(asked: Combination) -> None:
    assert refused(asked) is None


@pytest.mark.parametrize(
    ("settings", "facts", "words"),
    [
        ({"max_length": 65}, {"positions": 64}, "65 tokens exceed the 64 positions"),
        (ULYSSES, {"heads": 6, "key_heads": 3}, "6 attention heads and 3 key-value heads"),
        (RING, {"no_ring": "it has windows"}, "does not support the model: it has windows"),
        ({**ULYSSES, "max_length": 64, "attention": "sdpa"}, {"window": 33}, "use --max-length 32"),
    ],
)
def test_models(settings: dict[str, Any], facts: dict[str, Any], words: str) -> None:
    asked = combination(**settings)
    assert refused(asked) is None
    assert words in str(refused(replace(asked, model=ModelFacts(**facts))))


def test_every_rule_has_a_case() -> None:
    first = {next(rule for rule, (matches, _) in enumerate(RULES) if matches(asked)) for asked, _ in REFUSED}
    assert first == set(range(len(RULES) - 4)), "the last four are of models"


def test_adapters_need_reentrant_checkpoints_of_old_deepspeed_under_zero3_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, needed in (("0.18.9", True), ("0.19.3+cu130", True), ("0.19.4", False), ("1.0.0", False)):
        monkeypatch.setattr(rules, "package_version", lambda _, version=version: version)
        assert rules.adapters_need_reentrant("zero3") == needed
        assert not rules.adapters_need_reentrant("zero2")
