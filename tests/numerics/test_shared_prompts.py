"""Samples with common prefixes in one row against one row per sample."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import seqtile
from numerics._errors import assert_all_no_worse, assert_as_exact_in_bf16
from numerics.test_chunks import FAMILIES, NO_FLOAT64, ROUNDED_TO_NOTHING, STATES, build, chunks_of, in_double
from refusals import refused
from seqtile import UserError
from seqtile.blocks.instance import TiledForward, installed_forwards
from seqtile.blocks.layer import TiledLayer
from seqtile.chunks.segment import ChunkForward
from seqtile.counting.live import count_live_bytes
from seqtile.counting.products import count_products
from seqtile.headwise.install_heads import HeadWise
from seqtile.ops.attention import piece_kernels
from seqtile.shared_prompts import TreeRow, share_prompts, tree_row
from seqtile.shared_prompts.model import TreeState, shares_prompts

PROMPT, OTHER = 45, 21
ANSWERS = (20, 1, 7)


def samples_of() -> tuple[list[Tensor], list[int]]:
    """A group of three, a group of one, and a rollout that branches twice; the groups are mixed."""
    generator = torch.Generator().manual_seed(1)

    def tokens(count: int) -> Tensor:
        return torch.randint(3, 61, (count,), generator=generator, device="cpu")

    prompt, other, turns = tokens(PROMPT), tokens(OTHER), [tokens(25) for _ in range(3)]
    group = [torch.cat([prompt, tokens(count)]) for count in ANSWERS]
    single = torch.cat([other, tokens(30)])
    branches = [torch.cat([prompt, turns[0], tokens(9)]), torch.cat([prompt, turns[0], turns[1]])]
    samples = [group[0], single, branches[0], group[1], branches[1], group[2]]
    return samples, [PROMPT, OTHER, PROMPT, PROMPT, PROMPT + 5, PROMPT]


def weights_of(count: int) -> Tensor:
    """What each scored token counts in the loss, as an advantage does."""
    return torch.linspace(0.5, 1.5, count, dtype=torch.float64)


def log_probs_of(model: nn.Module, hidden: Tensor, labels: Tensor) -> Tensor:
    logits: Tensor = model.get_output_embeddings()(hidden)  # type: ignore[operator]
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    chosen = wide.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return chosen.masked_fill(labels < 0, 0)


def finish(model: nn.Module, log_probs: Sequence[Tensor]) -> dict[str, Tensor | None]:
    values = torch.cat([*log_probs])
    loss = -(values * weights_of(len(values)).to(values)).sum()
    loss.backward()
    gradients = {name: copy.copy(weight.grad) for name, weight in model.named_parameters()}
    # The delta rule's decays get a small difference of large numbers, whose error follows its blocks, untiled too.
    left_out = ROUNDED_TO_NOTHING if causal_lm(model).config.model_type == "qwen3_5_text" else ()
    return {"loss": loss.detach(), **{n: grad for n, grad in gradients.items() if not n.endswith(left_out)}}


def causal_lm(model: nn.Module) -> Any:
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def apart(model: nn.Module) -> dict[str, Tensor | None]:
    """A row for each sample."""
    model.zero_grad()
    log_probs = []
    inner = causal_lm(model)
    for sample, prompt in zip(*samples_of(), strict=True):
        ids = sample[None].to(torch.get_default_device())
        hidden = inner.model(input_ids=ids, use_cache=False).last_hidden_state
        log_probs.append(log_probs_of(inner, hidden[:, prompt - 1 : -1], ids[:, prompt:])[0])
    return finish(model, log_probs)


def together(model: nn.Module, row: TreeRow | None = None) -> dict[str, Tensor | None]:
    """All of them in one row."""
    model.zero_grad()
    inner = causal_lm(model)
    row = tree_row(*samples_of(), device=torch.get_default_device()) if row is None else row
    hidden = inner.model(**row.inputs).last_hidden_state
    return finish(model, row.of_samples(log_probs_of(inner, hidden, row.labels)))


def truth_of(family: str, **changes: Any) -> dict[str, Tensor | None]:
    dtype = torch.float32 if family in NO_FLOAT64 else torch.float64
    return in_double(apart(build(family, dtype, **changes)))


FACTORS = {"qwen3_5_text": 16.0}
"""Its delta rule rounds in blocks of 64 tokens, which begin anew with each segment."""

FAMILIES_HERE = ["llama", "qwen3", *(name for name in FAMILIES if name != "llama")]


def test_row_has_each_prefix_once() -> None:
    samples, prompts = samples_of()
    row = tree_row(samples, prompts)
    assert row.tokens_apart == sum(map(len, samples))
    # A branch repeats the last token before it: three answers and one rollout leave the prompt, two leave the rollout.
    shared = PROMPT + 3 + sum(ANSWERS) + (25 - 1) + (1 + 9) + (1 + 25)
    assert row.tokens == shared + OTHER + 30
    assert sorted(map(len, row.segments.children)) == [0] * 6 + [2, 4]
    for sample, prompt, places in zip(samples, prompts, row.places.split(row.counts), strict=True):
        assert row.input_ids[0, places].tolist() == sample[prompt - 1 : -1].tolist()
        assert row.labels[0, places].tolist() == sample[prompt:].tolist()
        assert row.position_ids[0, places].tolist() == list(range(prompt - 1, len(sample) - 1))


@pytest.mark.parametrize("shortest", [1, 3, 1000])
def test_any_samples_make_a_row(shortest: int) -> None:
    """Also prefixes of one another, equal ones, and ones of a single token."""
    samples = [[5], [5, 6], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [5, 6, 7, 8, 1, 2], [4, 4, 4], [5, 6, 7]]
    row = tree_row(samples, shortest=shortest)
    for sample, places in zip(samples, row.places.split(row.counts), strict=True):
        assert row.input_ids[0, places].tolist() == sample[:-1]
        assert row.labels[0, places].tolist() == sample[1:]
    assert row.tokens == {1: 14, 3: 17, 1000: 20}[shortest] and row.tokens_apart == sum(map(len, samples))


def test_masks_of_scored_tokens() -> None:
    row = tree_row([[5, 6, 7, 8], [5, 6, 7, 9]], [[True, False, True, True], 3], shortest=1)
    assert [values.tolist() for values in row.of_samples(row.labels)] == [[7, 8], [9]]
    lengths = tree_row([[5, 6, 7, 8], [5, 6, 7, 9]], torch.tensor([1, 3]))
    assert [values.tolist() for values in lengths.of_samples(lengths.labels)] == [[6, 7, 8], [9]]
    two: Any = [[1, 2], [1, 3]]
    wrong: list[Any] = [([], None), ([[1], []], None), ([[1, 2]], [[True]]), (two, [1]), (two, [1, 1, 1]), (two, 1)]
    for samples, scored in wrong:
        with pytest.raises(ValueError, match="got"):
            tree_row(samples, scored)
    with pytest.raises(ValueError, match="shortest"):
        tree_row(two, shortest=0)


def test_deep_branches() -> None:
    """Each sample is a prefix of the next one."""
    samples = [list(range(1, 3 + count)) for count in range(1200)]
    assert tree_row(samples, shortest=1).tokens == 2 * 1200


@pytest.mark.device
@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_row_is_one_row_per_sample(family: str) -> None:
    expected = apart(build(family))
    model = build(family)
    shared = share_prompts(model)
    row = tree_row(*samples_of(), device=torch.get_default_device())
    got = together(model, row)
    assert (shared.tokens, shared.tokens_apart) == (row.tokens, row.tokens_apart)
    assert_all_no_worse(got, expected, truth_of(family), factor=FACTORS.get(family, 4.0), floor=2e-6)


SINGLES = [
    [5, 6, 7, 8, 9, 4], [5, 6, 7, 9, 11, 12], [5, 6, 7, 9, 11, 14, 3], [5, 7, 8, 9, 3], [5], [5, 6], [5, 6, 7, 8, 9, 4],
]  # fmt: skip


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("shortest", [1, 2, 3])
@pytest.mark.parametrize("family", ["llama", "lfm2", "falcon_h1", "qwen3_5_text"])
def test_segments_of_one_token(family: str, shortest: int, chunk: int | None) -> None:
    """Also behind one another, and with branches behind them; a layer with a state runs whole where they continue."""
    row = tree_row(SINGLES, shortest=shortest)

    def of_row(model: Any) -> dict[str, Tensor | None]:
        return together(model, row)

    def of_samples(model: Any) -> dict[str, Tensor | None]:
        model.zero_grad()
        rows = [torch.tensor([sample]) for sample in SINGLES]
        hidden = [model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1] for ids in rows]
        return finish(model, [log_probs_of(model, x, ids[:, 1:])[0] for x, ids in zip(hidden, rows, strict=True)])

    dtype = torch.float32 if family in NO_FLOAT64 else torch.float64
    expected, truth = of_samples(build(family)), in_double(of_samples(build(family, dtype)))
    model = build(family)
    share_prompts(model)
    if chunk:
        seqtile.apply(model, blocks="none", chunk=chunk, checkpoint="layer")
    factor = 64.0 if family == "qwen3_5_text" else 4.0  # its states of a few tokens are nearly zero
    assert_all_no_worse(of_row(model), expected, truth, factor=factor, floor=2e-6)


APPLIED: list[dict[str, Any]] = [
    dict(tile=16, checkpoint="layer"),
    dict(tile=16, checkpoint="attention-saved"),
    dict(tile=16, heads=1, blocks="mlp+norm+projections", checkpoint="attention-saved", offload=True),
    dict(tile=16, heads=1, blocks="mlp+norm+projections", checkpoint="layer", offload=True),
    dict(tile=1000),
]


@pytest.mark.device
@pytest.mark.parametrize("number", range(len(APPLIED)))
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss", "qwen3_moe", "deepseek_v3", "lfm2"])
@pytest.mark.parametrize("shared_first", [True, False])
def test_with_every_technique(family: str, number: int, shared_first: bool) -> None:
    settings = dict(APPLIED[number])
    if family == "deepseek_v3":
        settings.pop("heads", None)  # latent attention
    if family == "lfm2" and settings.get("blocks"):
        settings["blocks"] = "mlp"
    if family == "gpt_oss" and settings.get("checkpoint") == "attention-saved":
        settings["checkpoint"] = "layer"  # its eager attention has no kernel to keep the output of
    expected = apart(build(family))
    model = build(family)
    if shared_first:
        share_prompts(model)
    report = seqtile.apply(model, **settings)
    if not shared_first:
        share_prompts(model)
    row = tree_row(*samples_of(), device=torch.get_default_device())
    got = together(model, row)
    assert_all_no_worse(got, expected, truth_of(family), factor=4.0, floor=2e-6)
    forwards = [forward for forward in installed_forwards(model) if isinstance(forward, TiledForward | TiledLayer)]
    most = max(forward.most_tiles for forward in forwards)
    assert most == -(-row.tokens // settings["tile"]), report
    if "heads" in settings:
        by_heads = [forward for forward in installed_forwards(model) if isinstance(forward, HeadWise)]
        assert by_heads and all(forward.acted for forward in by_heads)
    if "checkpoint" in settings:
        assert not any("no effect" in note for note in report.notes), report.notes


CHUNKED: list[dict[str, Any]] = [
    dict(chunk=16),
    dict(chunk=16, segment=2, offload=True),
    dict(chunk=37, tile=8, blocks="mlp"),
]


@pytest.mark.device
@pytest.mark.parametrize("number", range(len(CHUNKED)))
@pytest.mark.parametrize("family", FAMILIES_HERE)
def test_in_chunks(family: str, number: int) -> None:
    """Chunks of attention hold parts of several segments; those of a state end with a segment."""
    expected = apart(build(family))
    model = build(family)
    shared_first = number != 1
    if shared_first:
        share_prompts(model)
    seqtile.apply(model, **{"blocks": "none", "checkpoint": "layer", **CHUNKED[number]})
    if not shared_first:
        share_prompts(model)
    got = together(model, row := tree_row(*samples_of(), device=torch.get_default_device()))
    assert_all_no_worse(got, expected, truth_of(family), factor=FACTORS.get(family, 4.0), floor=2e-6)
    most, joins = chunks_of(model), family not in STATES
    fewest = -(-row.tokens // CHUNKED[number]["chunk"])
    assert len(most) == 4 and (set(most) == {fewest} if joins else min(most) >= fewest), most


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_in_chunks_beside_other_calls(family: str) -> None:
    """Rows without segments run in chunks too, and rows without a gradient are the same."""
    model, samples = build(family), samples_of()[0]
    expected = model(input_ids=samples[0][None], labels=samples[0][None], use_cache=False)
    row = tree_row(*samples_of())
    share_prompts(model)
    whole = model(**row.inputs).logits
    seqtile.apply(model, blocks="none", chunk=16)
    with torch.no_grad():
        torch.testing.assert_close(model(**row.inputs).logits, whole)
    torch.testing.assert_close(model.eval()(**row.inputs).logits, whole)
    got = model.train()(input_ids=samples[0][None], labels=samples[0][None], use_cache=False)
    torch.testing.assert_close((got.loss, got.logits), (expected.loss, expected.logits))
    forwards = [forward for forward in installed_forwards(model) if isinstance(forward, ChunkForward)]
    assert not any(forward.refused for forward in forwards)
    assert min(chunks_of(model)) >= row.tokens // 16


@pytest.mark.parametrize("family", ["llama", "lfm2"])
def test_chunks_bound_the_memory_of_a_group(family: str) -> None:
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(3, 61, (500,), generator=generator)
    samples = [torch.cat([prompt, torch.randint(3, 61, (100,), generator=generator)]) for _ in range(3)]
    row, peaks = tree_row(samples, [500] * 3), []
    for chunk in (None, 64):
        model = build(family)
        share_prompts(model)
        seqtile.apply(model, tile=64, loss="tiled", loss_tile=64, chunk=chunk, checkpoint="layer")
        for _ in range(2):  # the first tries a layer, and makes the gradients
            with count_live_bytes() as live:
                model(**row.inputs, labels=row.labels, shift_labels=row.labels).loss.backward()
        peaks.append(live.peak)
    assert peaks[1] < 0.7 * peaks[0], peaks


@pytest.mark.parametrize("checkpoint", ["layer", "attention-saved"])
def test_kept_attention_is_not_computed_again(checkpoint: str) -> None:
    model = build("llama")
    share_prompts(model)
    seqtile.apply(model, tile=16, checkpoint=checkpoint)
    row = tree_row(*samples_of())
    with count_products() as counted:
        together(model, row)
    branching = sum(map(bool, row.segments.children))
    forward = len(row.segments.starts) + branching
    assert counted.attention_calls == 4 * forward * {"layer": 3, "attention-saved": 2}[checkpoint]


@pytest.mark.parametrize("options", [{}, dict(tile=16, checkpoint="attention-saved", heads=1)], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_adapters(family: str, options: dict[str, Any]) -> None:
    def adapted(dtype: torch.dtype = torch.float32) -> Any:
        model = build(family, dtype)
        torch.manual_seed(2)
        config = LoraConfig(
            r=3, target_modules=["q_proj", "v_proj", "down_proj", "in_proj_qkv"], init_lora_weights=False
        )
        return get_peft_model(model, config, autocast_adapter_dtype=False)

    expected, truth = apart(adapted()), in_double(apart(adapted(torch.float64)))
    model = adapted()
    share_prompts(model)
    if options:
        seqtile.apply(model, **options)
    got = together(model)
    assert_all_no_worse(got, expected, truth, factor=FACTORS.get(family, 4.0), floor=2e-6)


@pytest.mark.device
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "qwen3_5_text"])
def test_weights_in_bf16(family: str) -> None:
    sizes = dict(hidden_size=128, head_dim=64)
    expected = apart(build(family, torch.bfloat16, **sizes))
    model, exact = build(family, torch.bfloat16, **sizes), build(family, **sizes)
    exact.load_state_dict(model.state_dict())
    share_prompts(model)
    assert_as_exact_in_bf16(together(model), expected, in_double(apart(exact)), factor=3.0)


def test_under_autocast() -> None:
    results = []
    for shared in (False, True):
        model = build("llama")
        if shared:
            share_prompts(model)
        with torch.autocast("cpu", torch.bfloat16):
            results.append((together if shared else apart)(model))
    assert_all_no_worse(results[1], results[0], in_double(apart(build("llama"))), factor=3.0, floor=4e-3)


def test_other_calls_run_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the attention that the configuration names, with its own cache; copies are shared too, until undone."""
    samples, _ = samples_of()
    for attention in ("eager", "sdpa"):
        model = build("llama", attn_implementation=attention)
        untouched, names = copy.deepcopy(model), {id(module): dict(module.__dict__) for module in model.modules()}
        shared = share_prompts(model)
        copied = copy.deepcopy(model)
        for one in (model, copied):
            got = one(input_ids=samples[0][None], labels=samples[0][None], use_cache=False)
            expected = untouched(input_ids=samples[0][None], labels=samples[0][None], use_cache=False)
            torch.testing.assert_close(got.logits, expected.logits, rtol=0, atol=0)
            generated = one.eval().generate(samples[0][None], max_new_tokens=4, do_sample=False)
            assert torch.equal(
                generated, untouched.eval().generate(samples[0][None], max_new_tokens=4, do_sample=False)
            )
            assert one.config._attn_implementation == attention
        share_prompts(model)  # a second call replaces the first
        shared.remove()
        for module in model.modules():
            assert module.__dict__.keys() == names[id(module)].keys()
            assert module.__dict__.get("config") is names[id(module)].get("config")
            assert not any("TreeCalls" in repr(hook) for hook in module._forward_hooks.values())
        together(copied.train())


def test_tiled_loss_and_deferred_logits() -> None:
    """The row's labels are plain labels: the model's own loss runs on them, tiled or not."""
    row, losses = tree_row(*samples_of()), []
    for loss in (None, "tiled"):
        model = build("llama")
        share_prompts(model)
        seqtile.apply(model, tile=16, loss=loss)
        output = model(**row.inputs, labels=row.labels, shift_labels=row.labels)
        assert (output.logits is None) == (loss == "tiled")
        losses.append(output.loss)
    torch.testing.assert_close(losses[1], losses[0])
    with seqtile.deferred_logits(model):
        log_probs = model(**row.inputs).logits.scores(row.labels).log_probs
    expected = log_probs_of(model, model.model(**row.inputs).last_hidden_state, row.labels)
    torch.testing.assert_close(log_probs, expected)


@pytest.mark.parametrize("standing", [True, False])
def test_verify(standing: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    samples, prompts = samples_of()
    model = build("llama")
    report = seqtile.apply(model, tile=200)  # longer than the batches of verification, which are no training step
    if standing:
        share_prompts(model)
    result = seqtile.verify_shared_prompts(model, samples, prompts)
    assert result.ok and result.reference == "float64", result
    assert result.tiled.flops < 0.6 * result.untiled.flops
    assert shares_prompts(model) == standing and all(weight.grad is None for weight in model.parameters())
    with refused("verify.no-shared-prefix"):
        seqtile.verify_shared_prompts(model, samples[:2], prompts[:2])
    monkeypatch.setattr(piece_kernels, "join", lambda output, lse, other, of_other: (output, lse))
    wrong = seqtile.verify_shared_prompts(model, samples, prompts)
    assert not wrong.ok and "DIFFER" in str(wrong)
    assert "no effect" not in caplog.text + str(report)
    apart(model)
    assert "no effect" in caplog.text


@pytest.mark.parametrize("undone", [False, True])
@pytest.mark.parametrize("shared_first", [False, True])
def test_a_state_in_tiles_beside(shared_first: bool, undone: bool) -> None:
    """Rows are refused while it stands, whichever stands over the other; each comes off by itself."""
    model = build("lfm2")
    expected = apart(model)
    attributes = {name: module.__dict__.keys() for name, module in copy.deepcopy(model).named_modules()}
    shared = share_prompts(model) if shared_first else None
    seqtile.apply(model, blocks="none", state=16)
    shared = shared or share_prompts(model)
    row = tree_row(*samples_of())
    with refused("shared-prompts.with-state"):
        together(model, row)
    if undone:
        seqtile.undo(model)
        assert_all_no_worse(together(model, row), expected, truth_of("lfm2"), factor=4.0, floor=2e-6)
    shared.remove()
    assert not shares_prompts(model)
    assert not any(isinstance(module.__dict__.get("forward"), TreeState) for module in model.modules())
    seqtile.undo(model)
    assert {name: module.__dict__.keys() for name, module in model.named_modules()} == attributes


def test_nothing_is_left_of_hooks() -> None:
    model = build("llama")
    for _ in range(3):
        share_prompts(model)
        share_prompts(model).remove()
    flags = ("_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_forward_pre_hooks")
    assert not any(module.__dict__[name] for module in model.modules() for name in flags)


def shared(kind: str, **sizes: Any) -> Any:
    config = AutoConfig.for_model(kind, vocab_size=61, hidden_size=40, num_hidden_layers=2, **sizes)
    model = AutoModelForCausalLM.from_config(config).train()
    share_prompts(model)
    return model


def test_refused_heads() -> None:
    """Mamba-2's swallows the segments, and would run all samples as one."""
    try:
        model = shared("mamba2", state_size=4, num_heads=5, head_dim=16, n_groups=1)
    except UserError as error:
        pytest.skip(f"this version of transformers is refused at once: {error}")
    row = tree_row(*samples_of())
    with refused("shared-prompts.arguments-not-passed-on"):
        model(**row.inputs)
    assert model.backbone(**row.inputs).last_hidden_state.shape[:2] == (1, row.tokens)


SMALL: dict[str, Any] = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=56)
DECODER: dict[str, Any] = dict(d_model=40, decoder_layers=2, decoder_ffn_dim=56, decoder_attention_heads=4)


def test_refused_attention() -> None:
    """A mask of its own, positions that it counts itself, and queries scaled by their place in the row."""
    masked = shared("doge", keep_window_size=8, **SMALL)
    with refused("shared-prompts.call-unsupported", "mask of its own"):
        masked(**tree_row(*samples_of()).inputs)
    for kind in ("bart", "mbart", "blenderbot"):
        with refused("shared-prompts.mixer-unsupported", "position_ids"):
            shared(kind, **DECODER)
    layers: dict[str, Any] = dict(layer_types=["full_attention"] * 2, no_rope_layers=[1, 0])
    llama4 = dict(intermediate_size_mlp=56, num_local_experts=4, **layers, **SMALL)
    with refused("shared-prompts.mixer-unsupported", "attn_temperature_tuning"):
        shared("llama4_text", **llama4)
    shared("llama4_text", attn_temperature_tuning=False, **llama4)


def test_refused_models() -> None:
    with refused("shared-prompts.no-attention-layers"):
        share_prompts(nn.Linear(3, 4))
    dropping = build("llama", attention_dropout=0.1)
    share_prompts(dropping)
    with refused("shared-prompts.call-unsupported", "dropout"):
        dropping(**tree_row(*samples_of()).inputs)
    padded = build("llama")
    share_prompts(padded)
    inputs = tree_row(*samples_of()).inputs
    with refused("shared-prompts.call-unsupported", "expected one row"):
        padded(**{**inputs, **{name: inputs[name][:, :-1] for name in ("input_ids", "position_ids")}})


def test_a_model_that_keeps_its_arguments_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its samples would read each other: an error, not a wrong number."""
    model = build("llama")
    layer_class = type(model.model.layers[0].self_attn)
    forward = layer_class.forward

    def drops(self: Any, *args: Any, shared_prompts: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    share_prompts(model)
    monkeypatch.setattr(layer_class, "forward", drops)
    with refused("shared-prompts.arguments-not-passed-on", "self_attn"):
        model(**tree_row(*samples_of()).inputs)
