"""Vision towers in groups of frames and pictures: same outputs and gradients, less memory, and left whole where not."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, Trainer, TrainingArguments

import seqtile
from refusals import refused
from seqtile.counting.fake import fake_tensors
from seqtile.counting.live import count_live_bytes
from seqtile.vision.install_vision import VisionTechnique
from seqtile.vision.tower import VisionTower
from vision_zoo import (
    BY_GRID,
    END,
    FAMILIES,
    IMAGE,
    START,
    VIDEOS,
    batch_of,
    owner_of,
    picture_model,
    pixels_of,
    sound_model,
)
from zoo import assert_same_gradients, gradients

CALLS = [(family, video) for family in FAMILIES for video in (False, True) if not video or family in VIDEOS]
NO_FLOAT64 = ("qwen3_vl_moe",)
"""Their grouped product takes no float64."""

THREE_KINDS = ("qwen3_vl", "llava", "smolvlm")
"""By grid, by pictures, and by rows of pictures."""


OUT_OF_MEMORY = [
    torch.OutOfMemoryError("no memory"), MemoryError(),
    RuntimeError("[enforce fail at alloc_cpu.cpp:121] data. DefaultCPUAllocator: can't allocate memory"),
]  # fmt: skip


def in_groups_of(model: nn.Module, group: int | str) -> VisionTower:
    seqtile.apply(model, blocks="none", vision=group)
    (tower,) = VisionTechnique.installed(model)
    return tower


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    ours = [record for record in caplog.records if record.name.startswith("seqtile")]
    return [record.message for record in ours if record.levelno >= logging.WARNING]


def dtype_of(family: str) -> torch.dtype:
    return torch.float32 if family in NO_FLOAT64 else torch.float64


def relative_error(got: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> float:
    joined = [
        torch.cat([grad.double().flatten() for grad in all_.values() if grad is not None]) for all_ in (got, expected)
    ]
    return float((joined[0] - joined[1]).norm() / joined[1].norm())


@pytest.mark.parametrize(("family", "video"), CALLS)
def test_the_loss_and_every_gradient_are_those_of_the_whole_tower(family: str, video: bool) -> None:
    model = picture_model(family, dtype_of(family))
    batch = batch_of(model, pixels_of(family, 5, dtype_of(family), video=video))
    loss, expected = gradients(model, batch)
    tower = in_groups_of(model, 2)
    got_loss, got = gradients(model, batch)
    assert (tower.most_groups, tower.why_idle) == (3, "")
    torch.testing.assert_close(got_loss, loss)
    assert_same_gradients(got, expected)


@pytest.mark.parametrize(("family", "video"), [call for call in CALLS if call[0] not in NO_FLOAT64])
def test_groups_are_as_near_to_float64_as_the_whole_tower(family: str, video: bool) -> None:
    model = picture_model(family, torch.float64)
    batch = batch_of(model, pixels_of(family, 5, torch.float64, video=video))
    _, exact = gradients(model, batch)
    batch = {name: value.float() if value.is_floating_point() else value for name, value in batch.items()}
    model.float()
    untiled = relative_error(gradients(model, batch)[1], exact)
    in_groups_of(model, 2)
    assert relative_error(gradients(model, batch)[1], exact) <= 1.5 * untiled


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava_next_video"])
def test_pictures_and_videos_in_one_batch(family: str) -> None:
    model = picture_model(family, torch.float64)
    parts = (pixels_of(family, 3, torch.float64), pixels_of(family, 5, torch.float64, video=True))
    batch = batch_of(model, *parts, rows=3)
    _, expected = gradients(model, batch)
    tower = in_groups_of(model, 2)
    assert_same_gradients(gradients(model, batch)[1], expected)
    assert tower.most_groups == 3


def test_sounds_run_in_groups_of_clips() -> None:
    model = sound_model(torch.float64)
    sounds = torch.randn(3, 12, 40, generator=torch.Generator().manual_seed(1)).double()
    mask = (torch.arange(40) < torch.tensor([[40], [32], [20]])).long()
    weights = {name: weight for name, weight in model.named_parameters() if "audio_tower" in name}

    def step() -> dict[str, Tensor | None]:
        result = model.get_audio_features(sounds, feature_attention_mask=mask, return_dict=True)  # type: ignore[operator]
        rows = result.pooler_output if result.pooler_output is not None else result.last_hidden_state
        total = (rows * torch.linspace(0, 1, rows.numel()).reshape(rows.shape)).sum()
        return dict(zip(weights, torch.autograd.grad(total, [*weights.values()], allow_unused=True), strict=True))

    expected = step()
    tower = in_groups_of(model, 1)
    assert_same_gradients(step(), expected)
    assert tower.most_groups == 3


def with_adapters(model: nn.Module) -> nn.Module:
    peft = pytest.importorskip("peft")
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and "head" not in name]
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=3, target_modules=names, init_lora_weights=False))
    return adapted.double()


def with_frozen_tower(model: nn.Module) -> nn.Module:
    for name, weight in owner_of(model).named_parameters():
        weight.requires_grad_(name.startswith("language_model"))
    return model


def with_frozen_layers(model: nn.Module) -> nn.Module:
    """The mergers, or the projector, train before a frozen tower."""
    for name, weight in owner_of(model).named_parameters():
        is_projector = any(part in name for part in ("merger", "projector", "connector"))
        weight.requires_grad_(is_projector or name.startswith(("language_model", "text_model")))
    return model


def tower_layers(model: nn.Module) -> nn.ModuleList:
    return next(
        part
        for name, part in owner_of(model).named_modules()
        if isinstance(part, nn.ModuleList) and not name.startswith(("language_model", "text_model"))
    )


def untouched(model: nn.Module) -> nn.Module:
    return model


@pytest.fixture
def tower_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Whether a backward was running, at each call of a norm of the tower."""
    calls: list[bool] = []
    forward = nn.LayerNorm.forward

    def counted(self: nn.LayerNorm, x: Tensor) -> Tensor:
        calls.append(torch._C._current_graph_task_id() >= 0)
        return forward(self, x)

    monkeypatch.setattr(nn.LayerNorm, "forward", counted)
    yield calls


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("trained", [untouched, with_adapters, with_frozen_tower])
@pytest.mark.parametrize("family", THREE_KINDS)
def test_full_training_adapters_and_a_frozen_tower(
    family: str, trained: Callable[[nn.Module], nn.Module], checkpoints: bool, tower_calls: list[bool]
) -> None:
    model = picture_model(family, torch.float64)
    batch = batch_of(model, pixels_of(family, 5, torch.float64))
    model = trained(model)
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
        model.enable_input_require_grads()  # type: ignore[operator]
    _, expected = gradients(model, batch)
    tower = in_groups_of(model, 2)
    gradients(model, batch)  # with the trial
    tower_calls.clear()
    assert_same_gradients(gradients(model, batch)[1], expected)
    assert tower.most_groups == 3 and tower_calls
    assert any(tower_calls) == (trained is not with_frozen_tower), "a frozen tower is not recomputed, another one is"


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize(
    "family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava", "gemma3", "internvl", "smolvlm", "paligemma"]
)
def test_a_frozen_tower_runs_once_before_a_projector_that_trains(
    family: str, checkpoints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = with_frozen_layers(picture_model(family, torch.float64))
    batch = batch_of(model, pixels_of(family, 5, torch.float64))
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    _, expected = gradients(model, batch)
    tower = in_groups_of(model, 2)
    gradients(model, batch)  # with the trial
    before = {name: {*module.__dict__} for name, module in model.named_modules()}
    calls: list[bool] = []
    layers = tower_layers(model)
    forward = type(layers[0]).forward

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(self is layers[0])
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(layers[0]), "forward", counted)
    _, got = gradients(model, batch)
    assert_same_gradients(got, expected)
    assert (tower.most_groups, sum(calls)) == (3, 3)
    assert {name: {*module.__dict__} for name, module in model.named_modules()} == before
    projector = {name for name, grad in got.items() if grad is not None and "language" not in name}
    assert any("merger" in name or "proj" in name for name in projector)


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("family", ["qwen2_5_vl", *THREE_KINDS])
def test_later_layers_of_a_tower_train_behind_frozen_ones(family: str, checkpoints: bool) -> None:
    model = with_frozen_layers(picture_model(family, torch.float64))
    tower_layers(model)[1:].requires_grad_(True)
    batch = batch_of(model, pixels_of(family, 5, torch.float64))
    if checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    _, expected = gradients(model, batch)
    tower = in_groups_of(model, 2)
    assert_same_gradients(gradients(model, batch)[1], expected)
    assert tower.most_groups == 3


@pytest.mark.parametrize("family", THREE_KINDS)
def test_features_of_a_frozen_tower_have_no_graph(family: str) -> None:
    model = with_frozen_tower(picture_model(family))
    model.enable_input_require_grads()  # type: ignore[operator]
    tower = in_groups_of(model, 2)
    pixels = pixels_of(family, 5, torch.float32)
    features = owner_of(model).get_image_features(*pixels.values(), return_dict=True).pooler_output
    assert tower.most_groups == 3 and not any(rows.requires_grad for rows in features)


@pytest.mark.parametrize("family", THREE_KINDS)
def test_each_weight_gets_one_gradient(family: str) -> None:
    model = picture_model(family)
    batch = batch_of(model, pixels_of(family, 5, torch.float32))
    arrivals: dict[str, int] = {}

    def arrived(name: str) -> Callable[[Tensor], None]:
        return lambda _: arrivals.update({name: arrivals.get(name, 0) + 1})

    tower = in_groups_of(model, 1)
    for name, weight in model.named_parameters():
        weight.register_post_accumulate_grad_hook(arrived(name))
    gradients(model, batch)
    assert tower.most_groups == 5 and len(arrivals) > 50 and {*arrivals.values()} == {1}


@pytest.mark.parametrize("trained", [untouched, with_frozen_layers])
def test_a_recompute_draws_the_random_numbers_of_its_forward(trained: Callable[[nn.Module], nn.Module]) -> None:
    model = picture_model(
        "llava", torch.float64, vision_config={**FAMILIES["llava"]["vision_config"], "attention_dropout": 0.4}
    )
    owner = owner_of(trained(model))
    owner.multi_modal_projector.act = nn.Dropout(0.4)
    pixels = pixels_of("llava", 5, torch.float64)["pixel_values"]
    weights = [weight for name, weight in owner.named_parameters()
               if ("tower" in name or "projector" in name) and weight.requires_grad]  # fmt: skip

    def tower_gradients(parts: list[Tensor]) -> list[Tensor]:
        torch.manual_seed(7)
        features = [rows for part in parts for rows in owner.get_image_features(part, return_dict=True).pooler_output]
        total = (torch.stack(features) ** 2).sum()
        return [g for g in torch.autograd.grad(total, weights, allow_unused=True) if g is not None]

    by_hand = tower_gradients([pixels[:2], pixels[2:4], pixels[4:]])
    tower = in_groups_of(model, 2)
    owner.get_image_features(pixels, return_dict=True)  # with the trial, which draws nothing
    got = tower_gradients([pixels])
    assert tower.most_groups == 3
    scale = max(gradient.abs().max() for gradient in by_hand)
    for one, other in zip(got, by_hand, strict=True):
        torch.testing.assert_close(one / scale, other / scale)


@pytest.mark.parametrize("family", THREE_KINDS)
def test_autocast_of_the_forward_is_that_of_a_recompute(family: str) -> None:
    model = picture_model(family)
    batch = batch_of(model, pixels_of(family, 5, torch.float32))

    def step() -> dict[str, Tensor | None]:
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        return {name: copy.copy(weight.grad) for name, weight in model.named_parameters()}

    expected = step()
    exact = gradients(model, batch)[1]
    tower = in_groups_of(model, 2)
    assert relative_error(step(), exact) <= 1.5 * relative_error(expected, exact)
    assert tower.most_groups == 3


class Sees(nn.Module):
    """A merger behind which features see each other: those of one video, or all."""

    def __init__(self, merger: nn.Module, grid: list[list[int]] | None, weight: float = 1.0) -> None:
        super().__init__()
        self.merger, self.grid, self.weight = merger, grid, weight

    def forward(self, x: Tensor) -> Tensor:
        rows = self.merger(x)
        sizes = [len(rows)] if self.grid is None else [t * h * w // 4 for t, h, w in self.grid]
        return torch.cat([part + self.weight * part.mean(0) for part in rows.split(sizes)])


def test_pictures_that_see_each_other_are_left_whole_and_named(caplog: pytest.LogCaptureFixture) -> None:
    model = picture_model("qwen3_vl", torch.float64)
    visual = owner_of(model).visual
    visual.merger = Sees(visual.merger, None, weight=1e-9)  # below any tolerance
    batch = batch_of(model, pixels_of("qwen3_vl", 5, torch.float64))
    _, expected = gradients(model, batch)
    tower = in_groups_of(model, 2)
    with caplog.at_level(logging.WARNING):
        _, got = gradients(model, batch)
    assert tower.most_groups == 0 and tower.why_idle
    assert any("model" in message for message in warned(caplog))
    assert_same_gradients(got, expected)


def test_frames_that_see_each_other_are_kept_together() -> None:
    model = picture_model("qwen3_vl", torch.float64)
    visual = owner_of(model).visual
    visual.merger = Sees(visual.merger, [])
    forward = type(visual).forward

    def with_grid(x: Tensor, grid_thw: Tensor, **kwargs: Any) -> Any:
        visual.merger.grid = grid_thw.tolist()
        return forward(visual, x, grid_thw=grid_thw, **kwargs)

    visual.forward = with_grid
    videos = pixels_of("qwen3_vl", 3, torch.float64, video=True)
    more = pixels_of("qwen3_vl", 4, torch.float64, video=True, seed=4)
    both = {name: torch.cat([videos[name], more[name]]) for name in videos}
    batch = batch_of(model, both)
    _, expected = gradients(model, batch)
    tower = in_groups_of(model, 1)
    _, got = gradients(model, batch)
    assert (tower.units, tower.most_groups) == ("videos", 2)
    assert_same_gradients(got, expected)


@pytest.mark.parametrize(("group", "warns"), [(64, True), ("auto", False)])
def test_a_batch_that_is_one_group_warns_where_its_size_was_asked_for(
    group: int | str, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = picture_model("qwen3_vl")
    batch = batch_of(model, pixels_of("qwen3_vl", 3, torch.float32))
    in_groups_of(model, group)
    text = {name: value for name, value in batch.items() if name in ("input_ids", "labels")}
    text["input_ids"] = text["input_ids"].clamp(max=20)
    with caplog.at_level(logging.WARNING):
        gradients(model, text)
        assert not warned(caplog), "a step without pictures tells nothing"
        for _ in range(2):
            gradients(model, batch)
    assert len(warned(caplog)) == warns


def test_a_number_of_frames_needs_a_tower() -> None:
    from zoo import causal_lm

    model = causal_lm("llama")
    with refused("vision.no-tower"):
        seqtile.apply(model, blocks="none", vision=4)
    seqtile.apply(model, blocks="none", vision="auto")
    assert VisionTechnique.installed(model) == []


@pytest.mark.parametrize("family", THREE_KINDS)
def test_evaluation_runs_in_groups_too(family: str) -> None:
    model = picture_model(family, torch.float64).eval()
    batch = batch_of(model, pixels_of(family, 5, torch.float64))
    with torch.no_grad():
        expected = model(**batch).logits
        tower = in_groups_of(model, 2)
        torch.testing.assert_close(model(**batch).logits, expected)
    assert tower.most_groups == 3


def prompt_with_pictures(model: nn.Module, pixels: dict[str, Tensor]) -> dict[str, Tensor]:
    """One row in which each picture stands by itself between words, as a processor writes it."""
    with torch.no_grad():
        features = owner_of(model).get_image_features(*pixels.values(), return_dict=True).pooler_output
    marks = [token for rows in features for token in (START, *[IMAGE] * len(rows), END, 9)]
    ids = torch.tensor([[3, 7, *marks, 10, 11]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **pixels}
    if model.config.model_type in BY_GRID:  # type: ignore[union-attr]
        batch["mm_token_type_ids"] = (ids == IMAGE).long()
    if model.config.model_type == "gemma3":  # type: ignore[union-attr]
        batch["token_type_ids"] = (ids == IMAGE).long()
    return batch


@pytest.mark.parametrize("beams", [1, 2])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "llava", "internvl", "gemma3", "smolvlm"])
def test_generate_takes_pictures_and_gives_the_same_tokens(family: str, beams: int) -> None:
    model = picture_model(family, torch.float64).eval()
    batch = prompt_with_pictures(model, pixels_of(family, 5, torch.float64))
    settings = dict(max_new_tokens=3, num_beams=beams, do_sample=False, output_logits=True)

    def generated() -> tuple[Tensor, Tensor]:
        result = model.generate(**batch, **settings, return_dict_in_generate=True)  # type: ignore[operator]
        return result.sequences, torch.stack(result.logits)

    tokens, logits = generated()
    tower = in_groups_of(model, 2)
    got_tokens, got_logits = generated()
    assert tower.most_groups == 3 and torch.equal(got_tokens, tokens)
    torch.testing.assert_close(got_logits, logits)


def test_hidden_states_that_are_asked_for_are_there() -> None:
    model = picture_model("qwen3_vl")
    tower = in_groups_of(model, 1)
    pixels = pixels_of("qwen3_vl", 3, torch.float32)
    result = owner_of(model).get_image_features(*pixels.values(), output_hidden_states=True, return_dict=True)
    assert result.last_hidden_state is not None and result.hidden_states and tower.most_groups == 0


def test_a_copy_runs_its_own_tower_and_removal_leaves_no_trace() -> None:
    model = picture_model("qwen3_vl")
    before = {name: {*module.__dict__} for name, module in model.named_modules()}
    batch = batch_of(model, pixels_of("qwen3_vl", 3, torch.float32))
    tower = in_groups_of(model, 1)
    copied = copy.deepcopy(model)
    gradients(copied, batch)
    assert tower.most_groups == 0 and VisionTechnique.installed(copied)[0].most_groups == 3
    in_groups_of(model, 2)
    assert [again.group for again in VisionTechnique.installed(model)] == [2]
    assert seqtile.undo(model) == 0
    assert {name: {*module.__dict__} for name, module in model.named_modules()} == before
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("options", [(dict(vision=1, loss="tiled"),), (dict(loss="tiled"), dict(vision=1))])
def test_a_tower_whose_owner_computes_the_loss_leaves_no_trace(options: tuple[dict[str, Any], ...]) -> None:
    clip, text = FAMILIES["llava"]["vision_config"], FAMILIES["llava"]["text_config"]
    config = AutoConfig.for_model(
        "llama4",
        text_config={**text, "model_type": "llama4_text", "intermediate_size_mlp": 88, "num_local_experts": 2},
        vision_config={**clip, "model_type": "llama4_vision_model", "vision_output_dim": 48},
    )
    model = AutoModelForImageTextToText.from_config(config)
    before = {name: {*module.__dict__} for name, module in model.named_modules()}
    for settings in options:
        seqtile.apply(model, blocks="none", **settings)
    (tower,) = VisionTechnique.installed(model)
    assert tower.module is model
    seqtile.undo(model)
    assert {name: {*module.__dict__} for name, module in model.named_modules()} == before


def test_the_step_of_a_plan_leaves_the_warning_to_the_first_real_step(caplog: pytest.LogCaptureFixture) -> None:
    model = picture_model("llava")
    batch = batch_of(model, pixels_of("llava", 3, torch.float32))
    in_groups_of(model, 64)
    with caplog.at_level(logging.WARNING):
        with fake_tensors():
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            fake = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
            fake_batch = {name: torch.empty(value.shape, dtype=value.dtype) for name, value in batch.items()}
            torch.func.functional_call(model, fake, (), fake_batch)
        assert not warned(caplog)
        gradients(model, batch)
    assert len(warned(caplog)) == 1


def test_a_compiled_tower_runs_whole_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    parts = {name: {**FAMILIES["llava"][name], "num_hidden_layers": 1} for name in ("text_config", "vision_config")}
    model = picture_model("llava", **parts)
    batch = batch_of(model, pixels_of("llava", 3, torch.float32))
    loss = model(**batch).loss
    tower = in_groups_of(model, 1)
    model.compile(backend="eager")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            torch.testing.assert_close(model(**batch).loss, loss)
    assert tower.most_groups == 0 and len(warned(caplog)) == 1


class OtherTower:
    """An attribute of a module that has a ``tower`` of its own, which cannot be a key."""

    tower: list[int] = []


def test_other_attributes_of_modules_are_not_looked_into() -> None:
    model = picture_model("llava")
    model.something = OtherTower()  # type: ignore[assignment]
    tower = in_groups_of(model, 1)
    assert VisionTechnique.installed(model) == [tower]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_in_the_trial_is_raised_and_the_trial_comes_again(error: Exception) -> None:
    model = picture_model("llava")
    batch = batch_of(model, pixels_of("llava", 3, torch.float32))
    tower = in_groups_of(model, 1)

    def runs_out(*_: Any, **__: Any) -> None:
        raise error

    layer = owner_of(model).vision_tower
    forward, layer.forward = layer.forward, runs_out
    with pytest.raises(type(error)):
        model(**batch)
    layer.forward = forward
    gradients(model, batch)
    assert tower.most_groups == 3


def peak(family: str, frames: int, group: int | None, trains: bool) -> tuple[int, int, int]:
    """Peak of live bytes of forward and backward of the features; bytes of these, and of the tower's weights."""
    model = picture_model(family)
    owner = owner_of(model)
    if not trains:
        with_frozen_tower(model)
    if group is not None:
        in_groups_of(model, group)
    video = family in BY_GRID
    pixels = pixels_of(family, frames, torch.float32, video=video, size=2)
    method = owner.get_video_features if video else owner.get_image_features
    size = 0
    for _ in range(2):  # the first call has the trial
        with count_live_bytes() as live:
            result = method(*pixels.values(), return_dict=True)
            tensors = [
                *result.pooler_output,
                *(rows for layer in result.get("deepstack_features", ()) for rows in layer),
            ]
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            if trains:
                sum(tensor.square().sum() for tensor in tensors).backward()
            del result, tensors
    weights = [w for name, w in owner.named_parameters() if not name.startswith("language_model")]
    return live.peak, size, sum(weight.numel() * weight.element_size() for weight in weights)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "llava", "gemma3"])
def test_sixty_four_frames_take_the_memory_of_four_and_their_features(family: str, trains: bool) -> None:
    of_four, few, weights = peak(family, 4, 4, trains)
    of_all, features, _ = peak(family, 64, 4, trains)
    whole, _, _ = peak(family, 64, None, trains)
    sums = weights if trains else 0  # of gradients, over the groups
    # Features are there once, and once as parts that are joined or as gradients, and as what the square keeps.
    assert of_all <= of_four + 3 * (features - few) + sums, (of_four, of_all, features, whole)
    assert of_all < whole / 2


TOGETHER: dict[str, dict[str, Any]] = {
    "loss": dict(loss="tiled", loss_tile=5),
    "attention-saved": dict(checkpoint="attention-saved"),
    "offload": dict(checkpoint="layer", offload=True),
    "heads": dict(heads=1),
    "chunk": dict(chunk=8),
    "projections": dict(tile=8, blocks="mlp+norm+projections"),
    "all": dict(tile=8, loss="tiled", loss_tile=5, checkpoint="attention-saved", offload=True, heads=1),
}
PICTURES_SEE_EACH_OTHER = ("gemma3", "paligemma")
"""In their language models, so that chunks run whole."""


@pytest.mark.parametrize("technique", TOGETHER)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_technique_is_exact_and_has_an_effect_with_pictures_in_the_sequence(
    family: str, technique: str, caplog: pytest.LogCaptureFixture
) -> None:
    options = TOGETHER[technique]
    dtype = dtype_of(family)
    model = picture_model(family, dtype)
    batch: dict[str, Any] = batch_of(model, pixels_of(family, 5, dtype, video=family in VIDEOS))
    batch["use_cache"] = False
    if "checkpoint" in options:
        model.gradient_checkpointing_enable()  # type: ignore[operator]
    loss, expected = gradients(model, batch)
    with caplog.at_level(logging.WARNING):
        seqtile.apply(model, **(options if "tile" in options else {"blocks": "none", **options}), vision=2)
        (tower,) = VisionTechnique.installed(model)
        got_loss, got = gradients(model, batch)
    assert tower.most_groups == 3
    torch.testing.assert_close(got_loss.to(loss.dtype), loss)  # untiled, a loss is in fp32
    assert_same_gradients(got, expected)
    without_effect = technique == "chunk" and family in PICTURES_SEE_EACH_OTHER
    assert bool(warned(caplog)) == without_effect, caplog.text


def test_a_trainer_with_the_callback_has_the_untiled_losses(tmp_path: Path) -> None:
    batch = batch_of(picture_model("qwen3_vl"), pixels_of("qwen3_vl", 5, torch.float32, video=True))

    def losses(*callbacks: seqtile.TilingCallback) -> list[float]:
        model = picture_model("qwen3_vl")
        settings = dict(max_steps=3, per_device_train_batch_size=1, logging_steps=1, learning_rate=1e-2)
        arguments = TrainingArguments(
            str(tmp_path), report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, **settings
        )
        trainer = Trainer(
            model, arguments, train_dataset=[0] * 8, callbacks=[*callbacks],
            data_collator=lambda _: {name: value.clone() for name, value in batch.items()},
        )  # fmt: skip
        trainer.train()
        assert [tower.most_groups for tower in VisionTechnique.installed(model)] == [3] * len(callbacks)
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    expected = losses()
    got = losses(seqtile.TilingCallback(vision=2, tile=8, loss="tiled"))
    assert len(got) == 3 and got == pytest.approx(expected, rel=1e-5)
