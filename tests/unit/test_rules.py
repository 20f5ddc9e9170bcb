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

from refusals import refused
from seqtile import rules
from seqtile.install.apply import apply_options
from seqtile.integrations import ms_swift
from seqtile.integrations.axolotl_checks import check_settings
from seqtile.integrations.callback import _check_trainer
from seqtile.options import DEFAULTS, TilingOptions
from seqtile.planner.accelerators import find_device
from seqtile.planner.request import Request, check_request, check_request_combination
from seqtile.planner.step_config import Lora
from seqtile.rules import RULES, Combination, ModelFacts, check_combination, refusal
from seqtile.train.recipe import build_recipe, resolve

TILED_LOSS = {"loss": "tiled"}


def combination(options: dict[str, Any] | None = None, **settings: Any) -> Combination:
    return Combination(TilingOptions(**(options or {})), **settings)


RING, ULYSSES = {"engine": "fsdp2", "cp_size": 2}, {"engine": "zero3", "sp_size": 2}

REFUSED: list[tuple[Any, ...]] = [
    (combination({"blocks": "none", "keep": 0.5, "checkpoint": "layer"}), "blocks.none-with-options", "so keep would"),
    (combination({"chunk": 64, "keep": 0.5}), "chunk.with-keep"),
    (combination({"loss_tile": 512}), "loss.options-without-loss", "loss_tile"),
    (combination({"checkpoint": "auto"}), "checkpoint.auto-outside-plan"),
    (combination({"offload": True}, recomputes=False), "checkpoint.recompute-off"),
    (combination(TILED_LOSS, framework="ms-swift"), "framework.unverified-options", "loss"),
    (combination({"vision": 4}, framework="ms-swift"), "framework.unverified-options", "vision"),
    (combination({"segment": 2}), "segment.without-chunk"),
    (combination({"chunk": 64, "heads": 1}), "chunk.bounded-twice", "heads"),
    (combination({"chunk": 64, "checkpoint": "attention-saved"}), "chunk.bounded-twice", "'attention-saved'"),
    (combination({"chunk": 64, "checkpoint": "none:2"}), "chunk.bounded-twice", "'none:2'"),
    (combination({"chunk": 64, "segment": 2}, engine="fsdp2"), "segment.streamed-weights", "engine 'fsdp2'"),
    (
        combination({"chunk": 64, "segment": 2, "offload": "weights"}, adapters=True),
        "segment.streamed-weights",
        "offload 'weights'",
    ),
    (combination({"chunk": 64}, **RING), "chunk.with-sequence-parallel", "cp_size 2"),
    (combination({"path": "fused"}, mlp_kernels=("lora_mlp_kernel",)), "path.fused-with-other-mlp", "lora_mlp_kernel"),
    (combination(TILED_LOSS, losses=("cut_cross_entropy",)), "loss.with-other-loss", "cut_cross_entropy"),
    (combination({"offload": True}, checkpointers=("activation_offloading",)), "checkpoint.with-other-checkpoints"),
    (
        combination(product_savers=("selective_checkpointing.save: aten::mm",)),
        "tile.with-saved-products",
        "save: aten::mm",
    ),
    (combination({"offload": True}, offloaders=("trainer.activation_offloading",)), "offload.with-other-offload"),
    (combination(engine="single", processes=2), "engine.single-with-processes"),
    (combination(engine="ddp", processes=1), "engine.ddp-alone"),
    (combination(engine="zero3", processes=8, nodes=3), "nproc.not-multiple-of-nodes", "multiple of 3"),
    (combination(engine="ddp", processes=2, engine_offload=("optimizer",)), "engine-offload.not-sharded", "'ddp'"),
    (combination(engine="zero2", engine_offload=("weights",)), "engine-offload.zero2-weights"),
    (combination(engine="fsdp2", engine_offload=("optimizer",)), "engine-offload.fsdp2-partly", "optimizer only"),
    (combination({"offload": "weights"}, engine="zero3", adapters=True), "offload.weights-several-processes"),
    (combination({"offload": "weights"}, engine="single"), "offload.weights-trained"),
    (combination(engine="fsdp2", trainer={"save_on_each_node": True}), "trainer.save-on-each-node"),
    (
        combination({"checkpoint": "attention-saved"}, engine="single", attention="eager"),
        "checkpoint.attention-saved-unsupported",
        "an attention kernel",
    ),
    (
        combination({"checkpoint": "attention-saved"}, engine="zero3", adapters=True),
        "checkpoint.attention-saved-unsupported",
        "DeepSpeed 0.19.4",
    ),
    (
        combination({"checkpoint": "none:1+attention-saved:2"}, **RING),
        "checkpoint.attention-saved-unsupported",
        "cp_size 2",
    ),
    (combination(engine="fsdp2", sp_size=2, cp_size=2), "sp-size.with-cp-size"),
    (combination(engine="zero3", cp_size=2), "cp-size.needs-fsdp2"),
    (combination(engine="zero2", sp_size=2), "sp-size.with-zero2", "2 times"),
    (combination(engine="fsdp2", sp_size=2), "sp-size.needs-zero3"),
    (combination(engine="single", processes=1, sp_size=2), "sp-size.needs-zero3"),
    (combination(**ULYSSES, processes=3), "nproc.not-multiple-of-split"),
    (combination(**RING, processes=3), "nproc.not-multiple-of-split"),
    (combination(**ULYSSES, max_length=65), "max-length.not-multiple-of-split", "--max-length 64"),
    (combination(**RING, max_length=66), "max-length.not-multiple-of-split", "--max-length 64"),
    (combination(**ULYSSES, trainer={"pad_to_multiple_of": 3}), "trainer.pad-not-multiple-of-split", "multiple of 2"),
    (combination(**RING, trainer={"pad_to_multiple_of": 2}), "trainer.pad-not-multiple-of-split", "multiple of 4"),
    (combination(**RING, attention="eager"), "cp-size.needs-sdpa"),
    *((combination(**RING, packing=packing), "cp-size.with-packing") for packing in (True, "wrapped")),
    *((combination(**RING, trainer={key: True}), "cp-size.with-packing") for key in ("padding_free", "eval_packing")),
    *((combination(**ULYSSES, packing=packing), "sp-size.with-packing") for packing in (True, "bfd")),
    *(
        (combination(**ULYSSES, trainer={key: True}), "sp-size.with-packing")
        for key in ("padding_free", "eval_packing")
    ),
    (combination(**RING, trainer={"label_smoothing_factor": 0.1}), "cp-size.with-label-smoothing"),
    (combination({"heads": 1}, **RING), "heads.with-cp-size"),
]
"""A combination, the id of its refusal, and values in the sentence."""

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
    for asked, code, *_ in REFUSED:
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
                if refusal(case) is None:  # the callback does not see the engine
                    continue
                cases.append(pytest.param(door, case, id=f"{name}-{code}"))
    return cases


@pytest.fixture(autouse=True)
def old_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "package_version", lambda _: "0.19.3")


@pytest.mark.parametrize("case", REFUSED, ids=[code for _, code, *_ in REFUSED])
def test_refused(case: tuple[Any, ...]) -> None:
    asked, code, *values = case
    with refused(code, *values) as raised:
        check_combination(asked)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("door", "asked"), of_doors())
def test_every_door_refuses_it_with_the_same_sentence(door: Callable[[Combination], None], asked: Combination) -> None:
    expected = refusal(asked)
    assert expected is not None
    with refused(expected.code, str(expected)):
        door(asked)


@pytest.mark.parametrize("asked", ALLOWED)
def test_allowed(asked: Combination) -> None:
    assert refusal(asked) is None


MODELS: list[tuple[Any, ...]] = [
    ({"max_length": 65}, {"positions": 64}, "max-length.beyond-positions", "65 tokens"),
    (ULYSSES, {"heads": 6, "key_heads": 3}, "sp-size.heads-do-not-divide", "6 attention heads and 3 key-value heads"),
    (RING, {"no_ring": "it has windows"}, "cp-size.model-unsupported", "it has windows"),
    ({**ULYSSES, "max_length": 64, "attention": "sdpa"}, {"window": 33}, "sp-size.drops-window", "--max-length 32"),
]


@pytest.mark.parametrize("case", MODELS, ids=[code for _, _, code, _ in MODELS])
def test_models(case: tuple[Any, ...]) -> None:
    settings, facts, code, value = case
    asked = combination(**settings)
    check_combination(asked)
    with refused(code, value):
        check_combination(replace(asked, model=ModelFacts(**facts)))


def test_every_rule_has_a_case() -> None:
    assert {code for code, _, _ in RULES} == {code for _, code, *_ in REFUSED} | {code for _, _, code, _ in MODELS}


def test_adapters_need_reentrant_checkpoints_of_old_deepspeed_under_zero3_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, needed in (("0.18.9", True), ("0.19.3+cu130", True), ("0.19.4", False), ("1.0.0", False)):
        monkeypatch.setattr(rules, "package_version", lambda _, version=version: version)
        assert rules.adapters_need_reentrant("zero3") == needed
        assert not rules.adapters_need_reentrant("zero2")
