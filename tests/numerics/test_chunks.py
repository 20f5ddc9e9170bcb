"""Decoder layers in chunks of the sequence against the same layers whole."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import seqtile
from numerics._errors import assert_all_no_worse, assert_no_worse
from refusals import refused
from seqtile import UserError
from seqtile._compat import checkpoints_in_forward, has_kernel
from seqtile.blocks.instance import TiledForward, installed_forwards
from seqtile.blocks.layer import TiledLayer
from seqtile.blocks.norms_and_projections import KernelNorm
from seqtile.checkpointing import host_offload
from seqtile.checkpointing.host_offload import HostMemory
from seqtile.checkpointing.policies import installed_checkpointing
from seqtile.chunks import segment as segment_module
from seqtile.chunks.segment import ChunkForward
from seqtile.counting.live import count_live_bytes
from seqtile.counting.products import count_products
from seqtile.host_weights import installed_host_weights
from seqtile.ops.attention import piece_kernels, prefix
from seqtile.ops.attention.piece_kernels import Piece, Plain
from seqtile.ops.attention.prefix import GivenMask, KeyValues, Visible, prefix_attention
from seqtile.tiling import chunk_sizes

SIZES = dict(
    hidden_size=40, intermediate_size=72, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=61, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, decoder_sparse_step=1)
SLIDING = ["sliding_attention", "full_attention"] * 2
DELTA = dict(
    linear_num_value_heads=6, linear_num_key_heads=3, linear_key_head_dim=8, linear_value_head_dim=12,
    layer_types=["linear_attention", "full_attention"] * 2,
)  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma2": dict(sliding_window=24, layer_types=SLIDING, attn_logit_softcapping=0.05, attn_implementation="eager"),
    "gemma3_text": dict(sliding_window=24, layer_types=SLIDING),
    "gpt_oss": dict(num_local_experts=6, num_experts_per_tok=2, sliding_window=24, layer_types=SLIDING),  # sinks
    "qwen3_moe": EXPERTS,
    "deepseek_v3": dict(  # latent attention: values are narrower than keys
        n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, n_group=1, topk_group=1, q_lora_rank=20,
        kv_lora_rank=28, qk_rope_head_dim=8, qk_nope_head_dim=10, v_head_dim=12, first_k_dense_replace=1,
        num_key_value_heads=4, head_dim=8,
    ),
    "qwen3_5_text": DELTA,
    "lfm2": dict(layer_types=["conv", "full_attention"] * 2, block_auto_adjust_ff_dim=False),
    "falcon_h1": dict(mamba_n_heads=6, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=10, mamba_chunk_size=4,
                      mamba_d_ssm=48),  # attention and a state in one layer
}  # fmt: skip
MAMBA2 = dict(mamba_n_heads=5, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=10, mamba_chunk_size=16)
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_next": {**DELTA, **EXPERTS, "shared_expert_intermediate_size": 28, "mlp_only_layers": [0]},
    "olmo_hybrid": DELTA,
    "jamba": dict(  # Mamba-1, which runs whole
        mamba_d_state=10, mamba_dt_rank=6, num_experts=5, num_experts_per_tok=2, attn_layer_period=2,
        attn_layer_offset=1, use_mamba_kernels=False,
    ),
    "bamba": dict(**MAMBA2, attn_layer_indices=[1, 3]),
    "granitemoehybrid": dict(
        **MAMBA2, layer_types=["mamba", "attention"] * 2, num_local_experts=6, num_experts_per_tok=2,
        shared_intermediate_size=28,
    ),
    "nemotron_h": dict(  # the last layer is an MLP alone
        mamba_num_heads=5, mamba_head_dim=16, n_groups=1, ssm_state_size=10, chunk_size=16,
        layers_block_type=["mamba", "attention", "mamba", "mlp"], use_mamba_kernels=False,
    ),
    "zamba2": dict(  # its shared attention reads the embeddings too
        attention_hidden_size=80, attention_head_dim=20, mamba_d_state=10, mamba_ngroups=1, n_mamba_heads=5,
        mamba_headdim=16, chunk_size=16, num_key_value_heads=4, num_mem_blocks=1, adapter_rank=6,
        layers_block_type=["mamba", "hybrid"] * 2, use_mamba_kernels=False,
    ),
}  # fmt: skip
NO_FLOAT64 = {"qwen3_next", "jamba", "granitemoehybrid", "qwen3_moe", "deepseek_v3", "gpt_oss", "gemma2"}
"""Their grouped product takes no float64, or their eager attention has a softmax in fp32, where a mask overflows."""

ROUNDED_TO_NOTHING = ("A_log", "dt_bias")
"""Parameters whose gradient is a small difference of large numbers, untiled too."""


CAPTURES = find_spec("transformers.utils.output_capturing") is not None
STATES = {"qwen3_5_text", "lfm2", "falcon_h1"}
HANDS_STATES_ON = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 16)
"""Earlier versions drop a state that is given to more than one token."""


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if family in STATES | HYBRIDS.keys() and not HANDS_STATES_ON:
        pytest.skip(f"transformers {transformers.__version__} drops a state that is given to more than one token")
    torch.manual_seed(0)
    settings = {**SIZES, **(FAMILIES | HYBRIDS).get(family, {}), **changes}
    attention = settings.pop("attn_implementation", None)
    config = AutoConfig.for_model(family, **settings)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention).to(dtype).train()


def batch_of(rows: int = 2, tokens: int = 150, padded: str = "", seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, SIZES["vocab_size"], (rows, tokens), generator=generator, device="cpu")
    batch = dict(input_ids=ids, labels=ids.clone())
    if padded:
        mask = torch.ones_like(ids)
        mask[0, slice(0, 45) if padded == "left" else slice(tokens - 45, None)] = 0
        batch["labels"][mask == 0] = -100
        batch["labels"][0, 45] = -100  # predicted from a padded token
        batch["attention_mask"] = mask
    return {name: value.to(torch.get_default_device()) for name, value in batch.items()}


def step(model: nn.Module, *batches: Mapping[str, Tensor], autocast: bool = False) -> dict[str, Tensor | None]:
    """Loss and gradients of a step of one or more micro-batches."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    device = next(model.parameters()).device.type
    for batch in batches:
        torch.manual_seed(3)
        with torch.autocast(device, torch.bfloat16) if autocast else nullcontext():
            loss = model(**batch).loss
        loss.backward()
        total += loss.detach().double().cpu()
    gradients = {name: copy.copy(weight.grad) for name, weight in model.named_parameters()}
    return {
        "loss": total.float().to(device),
        **{n: g for n, g in gradients.items() if not n.endswith(ROUNDED_TO_NOTHING)},
    }


def in_double(result: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if value is None else value.double() for name, value in result.items()}


def chunks_of(model: nn.Module) -> list[int]:
    """Most chunks of each layer."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    return [forward.chunks for forward in forwards if isinstance(forward, ChunkForward)]


@pytest.fixture(autouse=True)
def _warnings_are_seen(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    with caplog.at_level(logging.WARNING, "seqtile"):
        yield


BLOCKS: list[dict[str, Any]] = [{"blocks": "none"}, {"tile": 36}, {"blocks": "mlp", "tile": 36}]

SHAPES = [(64, 1), (64, 2), (128, 4), (64, 3), (7, 1), (999, 2)]
"""Chunk and segment; a chunk of 7 cuts a delta rule's blocks, whose rounding then differs."""


@pytest.mark.device
@pytest.mark.parametrize("padded", ["", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_are_the_whole_layers(family: str, padded: str) -> None:
    eager = family in ("gemma2", "gpt_oss")
    batch = batch_of(padded=padded)
    truth = in_double(step(build(family, torch.float32 if family in NO_FLOAT64 else torch.float64), batch))
    whole = step(build(family), batch)
    for number, (chunk, segment) in enumerate(SHAPES):
        if eager and padded:
            segment = 1  # layers with a window alone run whole
        if chunk == 7 and family == "qwen3_5_text":
            continue
        model = build(family)
        report = seqtile.apply(model, chunk=chunk, segment=segment, **BLOCKS[number % 3])
        got = step(model, batch)
        if not (eager and padded):  # where a mask that is added hides all tokens from some, they attend to all
            assert chunks_of(model) == [-(-150 // chunk)] * 4, (report.notes, chunk, segment)
        assert_all_no_worse(got, whole, truth, factor=4.0, floor=2e-6)


@pytest.mark.parametrize("family", HYBRIDS)
def test_labels_of_hybrids(family: str) -> None:
    """Ignored tokens, left padding and a tiled loss, with and without a cache that the model makes."""
    batch = batch_of(padded="left")
    batch["labels"][1, 70:90] = -100
    exact = torch.float32 if family in NO_FLOAT64 else torch.float64
    expected, truth = step(build(family), batch), in_double(step(build(family, exact), batch))
    blocks = "none" if family == "zamba2" else "auto"
    for settings in (dict(segment=1), dict(segment=2)):
        model = build(family)
        report = seqtile.apply(model, chunk=64, loss="tiled", loss_tile=32, blocks=blocks, **settings)
        got = step(model, batch, dict(batch, use_cache=False))
        got = {name: None if value is None else value / 2 for name, value in got.items()}
        assert_all_no_worse(got, expected, truth, factor=4.0, floor=5e-6)
        assert chunks_of(model) == ([0, 3, 0, 3] if family == "jamba" else [3] * 4), report.notes


@pytest.mark.parametrize("segment", [1, 2])
@pytest.mark.parametrize("reentrant", [None, False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_activation_checkpoints_change_nothing(family: str, reentrant: bool | None, segment: int) -> None:
    batch = batch_of()
    expected = step(build(family), batch)
    truth = in_double(step(build(family, torch.float64), batch))
    model = build(family)
    if reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    seqtile.apply(model, chunk=64, segment=segment)
    assert_all_no_worse(
        step(
            model,
            batch,
        ),
        expected,
        truth,
        factor=4.0,
        floor=2e-6,
    )
    assert chunks_of(model) == [3] * 4


@pytest.mark.parametrize("order", ["whole between", "chunks between", "hidden states, chunks between"])
@pytest.mark.parametrize("embeddings", ["train", "are frozen", "are frozen, with input gradients"])
@pytest.mark.parametrize("segment", [1, 2])
def test_a_recompute_runs_as_its_forward_did(segment: int, embeddings: str, order: str) -> None:
    """Under a checkpoint around the layer's call, as FSDP's, whatever other calls ran in between.

    In bf16 the first tensor that a whole layer saves is another one than in chunks.
    """
    ids = batch_of(1)["input_ids"]
    sees_later = visible_to(150)
    sees_later[60:70, 60:70] = True
    chunked = dict(input_ids=ids, labels=ids)
    whole, alone = dict(chunked, attention_mask=sees_later[None, None]), dict(chunked, output_hidden_states=True)
    first, second = {
        "whole between": (chunked, whole), "chunks between": (whole, chunked),
        "hidden states, chunks between": (alone, chunked),
    }[order]  # fmt: skip

    def gradients(**settings: int) -> dict[str, Tensor]:
        model = build("llama", torch.bfloat16)
        model.config.use_cache = False
        model.get_input_embeddings().requires_grad_(embeddings == "train")
        if "input gradients" in embeddings:
            model.enable_input_require_grads()
        if settings:
            seqtile.apply(model, **settings)
        layers = model.model.layers
        for number, layer in enumerate(layers):
            layers[number] = checkpoint_wrapper(layer)
        loss = model(**first).loss
        model(**second)
        loss.backward()
        return {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}

    torch.testing.assert_close(gradients(chunk=64, segment=segment), gradients(), rtol=0.1, atol=5e-3)


@pytest.mark.parametrize("segment", [1, 2])
def test_a_hook_between_forward_and_backward_changes_nothing(segment: int) -> None:
    """It would keep the norm out of the MLP's tile, which its forward had in it."""
    batch, expected = batch_of(1), step(build("llama"), batch_of(1))
    model = build("llama")
    seqtile.apply(model, chunk=64, segment=segment)
    loss = model(**batch).loss
    for layer in model.model.layers:
        layer.mlp.register_forward_hook(lambda *_: None)
    loss.backward()
    got = {"loss": loss.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "qwen3_moe"])
def test_low_precision_under_autocast(family: str) -> None:
    batch = batch_of()
    whole, truth = step(build(family), batch, autocast=True), in_double(step(build(family), batch))
    model = build(family)
    seqtile.apply(model, chunk=64, segment=2)
    assert_all_no_worse(step(model, batch, autocast=True), whole, truth, factor=3.0, floor=4e-3)
    assert chunks_of(model) == [3] * 4


@pytest.mark.device
@pytest.mark.parametrize("blocks", ["none", "auto"])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "gemma3_text"])
def test_weights_in_bf16(family: str, blocks: str) -> None:
    batch, sizes = batch_of(tokens=200), dict(hidden_size=128, head_dim=64)
    models = [build(family, torch.bfloat16, **sizes) for _ in range(2)]
    exact = build(family, **sizes)
    exact.load_state_dict(models[0].state_dict())
    whole, truth = step(models[0], batch), step(exact, batch)
    seqtile.apply(models[1], chunk=64, segment=2, blocks=blocks)
    got = step(models[1], batch)
    assert chunks_of(models[1]) == [4] * 4
    # A chunk's output is rounded once more where pieces are joined.
    assert_all_no_worse(got, whole, {**in_double(truth), "loss": truth["loss"]}, factor=3.0, floor=5e-3)


def test_two_micro_batches_and_two_forwards_before_a_backward() -> None:
    batches = batch_of(), batch_of(rows=1, tokens=97, seed=2)
    truth = in_double(step(build("llama", torch.float64), *batches))
    model = build("llama")
    expected = step(model, *batches)
    seqtile.apply(model, chunk=64, segment=2)
    assert_all_no_worse(step(model, *batches), expected, truth, factor=4.0, floor=2e-6)
    model.zero_grad()
    losses = [model(**batch).loss for batch in batches]
    (losses[0] + losses[1]).backward()
    got = {"loss": expected["loss"], **{name: weight.grad for name, weight in model.named_parameters()}}
    assert_all_no_worse(got, expected, truth, factor=4.0, floor=2e-6)


def flash_attention_stand_in(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, position_ids: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Keeps documents apart by their positions, as flash attention does, with the products of SDPA."""
    documents = (position_ids[0].diff(prepend=position_ids[0, :1]) != 1).cumsum(0)
    seen = visible_to(q.shape[2]) & (documents[:, None] == documents)
    return F.scaled_dot_product_attention(q, k, v, seen, scale=scaling, enable_gqa=True).transpose(1, 2), None


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
@pytest.mark.parametrize("attention", ["sdpa", "eager", "flash_attention_2"])
def test_packed_documents_stay_apart(family: str, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents named by their positions, and by the ends that a padding-free collator gives."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", flash_attention_stand_in)
    lengths = (70, 3, 1, 50)
    ids = batch_of(1, sum(lengths))["input_ids"]
    labels = ids.clone()
    labels[0, torch.tensor((0, *lengths)).cumsum(0)[:-1]] = -100
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    ends = torch.tensor((0, *lengths)).cumsum(0).int()
    packed = dict(input_ids=ids, labels=labels, position_ids=positions, use_cache=False)  # a cache hides packing
    if family == "qwen3_5_text":
        numbers = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
        packed |= dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=70, max_length_k=70, seq_idx=numbers)

    def built(dtype: torch.dtype = torch.float32) -> Any:
        model = build(family, dtype)
        model.config._attn_implementation_internal = attention  # its setter looks for the kernel
        return model

    def one_by_one(dtype: torch.dtype) -> dict[str, Tensor | None]:
        model = built(dtype)
        count = sum(length - 1 for length in lengths)
        for document in ids[0].split(lengths):
            if document.numel() > 1:
                model(input_ids=document[None], labels=document[None], num_items_in_batch=count).loss.backward()
        gradients = {name: weight.grad for name, weight in model.named_parameters()}
        return {n: g for n, g in gradients.items() if not n.endswith(ROUNDED_TO_NOTHING)}

    model = built()
    seqtile.apply(model, chunk=64)
    got = step(model, packed)
    del got["loss"]
    assert_all_no_worse(got, one_by_one(torch.float32), in_double(one_by_one(torch.float64)), factor=4.0, floor=2e-5)
    assert all(chunks > 1 for chunks in chunks_of(model))


def test_documents_that_attention_alone_keeps_apart(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flash attention reads where positions start again; the state of the same layer does not."""
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "flash_attention_2", flash_attention_stand_in)
    positions = torch.cat([torch.arange(length) for length in (100, 50)])[None]
    batch = dict(batch_of(1), position_ids=positions, use_cache=False)
    models = [build("falcon_h1") for _ in range(2)]
    for model in models:
        model.config._attn_implementation_internal = "flash_attention_2"  # its setter looks for the kernel
    seqtile.apply(models[1], chunk=64)
    torch.testing.assert_close(step(models[1], batch), step(models[0], batch), rtol=1e-4, atol=1e-6)
    assert chunks_of(models[1]) == [0] * 4 and "cu_seq_lens_q" in caplog.text


def test_dropout_is_drawn_once_and_replayed() -> None:
    """The directional derivative under LoRA's dropout is the difference quotient of the loss under the same draw."""
    peft = pytest.importorskip("peft")
    model = build("llama", torch.float64)
    lora = peft.LoraConfig(r=4, target_modules="all-linear", lora_dropout=0.3, init_lora_weights=False)
    model = peft.get_peft_model(model, lora).train().double()
    seqtile.apply(model, chunk=64, segment=2)
    ids = batch_of(1)["input_ids"]
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    ways = [torch.randn(w.shape, generator=torch.Generator().manual_seed(4)).to(w) for w in trained]

    def loss() -> Tensor:
        torch.manual_seed(7)
        return F.cross_entropy(model(input_ids=ids, use_cache=False).logits[0, :-1].double(), ids[0, 1:])

    loss().backward()
    slope = sum(float((weight.grad * way).sum().detach()) for weight, way in zip(trained, ways, strict=True))
    values = []
    for sign in (1, -2):
        with torch.no_grad():
            for weight, way in zip(trained, ways, strict=True):
                weight.add_(sign * 1e-4 * way)
        values.append(float(loss().detach()))
    # Norms compute in fp32 even here, which bounds the quotient: 1e-7 of the loss over a step of 2e-4.
    assert slope == pytest.approx((values[0] - values[1]) / 2e-4, rel=5e-3)


@pytest.mark.parametrize("blocks", BLOCKS)
def test_products_are_those_of_checkpointed_layers_but_for_keys_and_values(blocks: dict[str, Any]) -> None:
    """11 units of the MLP, 8 frozen. Attention's projections run once more where their results are not kept."""
    batch = batch_of(1)

    def products(frozen: bool, **settings: Any) -> int:
        model = build("llama")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.model.layers.requires_grad_(not frozen)
        seqtile.apply(model, loss="tiled", **blocks, **settings)
        step(model, batch)
        with count_products() as counted:
            step(model, batch)
        return counted.flops

    sizes = SIZES
    hidden, heads, keys = sizes["hidden_size"], 4 * 16, 2 * 16
    again = 2 * 150 * hidden * (heads + 2 * keys)
    for frozen in (False, True):
        whole, in_chunks = products(frozen), products(frozen, chunk=64)
        assert in_chunks - whole <= 4 * again, frozen
        assert products(frozen, chunk=64, segment=4) <= whole + again + 3 * 2 * 150 * hidden * 72, frozen


@pytest.mark.parametrize("segment", [1, 2])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_blocks_run_in_tiles_of_a_chunk(family: str, segment: int) -> None:
    """Each chunk of 64 tokens is two tiles; experts run whole in a chunk."""
    model = build(family)
    seqtile.apply(model, chunk=64, segment=segment, tile=36)
    step(model, batch_of(1))
    kind = TiledLayer if family == "llama" else TiledForward
    tiles = [f.most_tiles for f in installed_forwards(model) if isinstance(f, kind) and not isinstance(f, KernelNorm)]
    assert chunks_of(model) == [3] * 4
    assert tiles == [2 if family == "llama" else 0] * 4


def test_a_tile_that_chunks_leave_whole_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama")
    seqtile.apply(model, chunk=64, tile=36, path="generic")
    step(model, batch_of(1))
    assert "tile=36 had no effect" in caplog.text
    caplog.clear()
    model = build("qwen3_moe")
    seqtile.apply(model, chunk=64)
    step(model, batch_of(1))
    assert "had no effect" not in caplog.text


@pytest.mark.parametrize("segment", [1, 4])
def test_a_tiled_block_takes_less_of_a_chunk(segment: int) -> None:
    """A segment's last layer keeps its MLP's input alone, the others gate and up: half of what they keep untiled."""

    def peak(**blocks: Any) -> int:
        model = build("llama", intermediate_size=360, max_position_embeddings=2048)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        seqtile.apply(model, chunk=256, segment=segment, loss="tiled", loss_tile=64, **blocks)
        step(model, batch_of(1, 200))
        with count_live_bytes("cpu") as live:
            model(**batch_of(1, 1024)).loss.backward()
        return live.peak

    gate = 256 * 360 * 4
    assert peak(tile=64) <= peak(blocks="none") - (1 if segment == 1 else 5) * gate


@pytest.fixture
def parked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Checkpoint and bytes of each tensor that goes to the host; what is there must not be read on the device."""
    moved, park = list[tuple[int, int]](), HostMemory.park

    def counted(memory: HostMemory, tensor: Tensor) -> Any:
        moved.append((memory.layer, tensor.nbytes))
        result = park(memory, tensor)
        if tensor.dim() == 4 and tensor.shape[2] == 150:  # keys and values, which the node owns
            tensor.detach().fill_(torch.nan)
        return result

    monkeypatch.setattr(HostMemory, "park", counted)
    return moved


def build_for_host(family: str, segment: int, dtype: torch.dtype = torch.float32) -> Any:
    model = build(family, dtype)
    if segment > 1 and not checkpoints_in_forward(model.model.layers[0]):
        pytest.skip(f"transformers {transformers.__version__} checkpoints each layer, and the segment keeps its input")
    return model


STATE_BYTES = {
    "qwen3_5_text": (6 * 8 * 12 + (2 * 3 * 8 + 6 * 12) * 4) * 4,  # of the delta rule, and of the convolution
    "falcon_h1": (6 * 8 * 10 + (48 + 2 * 10) * 4) * 4,
}
"""Of one layer with a state, for each sequence and chunk."""


@pytest.mark.parametrize("segment", [1, 2, 3, 4])
@pytest.mark.parametrize("family", ["llama", "qwen3_5_text", "deepseek_v3", "falcon_h1"])
def test_a_segment_keeps_its_input_states_keys_and_values_on_the_host(
    family: str, segment: int, parked: list[tuple[int, int]]
) -> None:
    """All but what the backward projects again from the input; exact to the untiled step's error."""
    batch = batch_of(padded="left")
    exact = torch.float32 if family in NO_FLOAT64 else torch.float64
    expected, truth = step(build(family), batch), in_double(step(build(family, exact), batch))
    model = build_for_host(family, segment)
    seqtile.apply(model, chunk=64, segment=segment, offload=True)
    assert_all_no_worse(step(model, batch), expected, truth, factor=4.0, floor=2e-6)
    assert chunks_of(model) == [3] * 4
    assert installed_checkpointing(model)[0].host.parked_bytes == 0
    tokens, starts = 2 * 150, range(0, 4, segment)
    each = 4 * (4 * (18 + 12) if family == "deepseek_v3" else 2 * 2 * 16)
    attends = [1, 3] if family == "qwen3_5_text" else range(4)
    again = [] if family == "falcon_h1" else starts  # its state would have to run again too
    kept = [number for number in attends if number not in again]
    carries = {"qwen3_5_text": [0, 2], "falcon_h1": range(4)}.get(family, [])
    inputs, states = tokens * 4 * 40 * len(starts), 2 * 2 * STATE_BYTES.get(family, 0) * len(carries)
    assert sum(nbytes for _, nbytes in parked) == inputs + states + tokens * each * len(kept)
    moved = [*starts, *2 * kept, *4 * [*carries]]  # two states at the starts of two chunks
    assert [number for number, _ in parked] == sorted(number // segment + 1 for number in moved)


@pytest.mark.parametrize("segment", [1, 2])
def test_what_is_on_the_host_is_not_on_the_device(segment: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """States at the chunks' starts too, once the forward has passed them; the backward needs a segment's at a time."""
    model = build_for_host("qwen3_5_text", segment)
    seqtile.apply(model, chunk=64, segment=segment, offload=True)
    step(model, batch_of())  # tries the layers
    on_device, park = list[weakref.ref[Any]](), HostMemory.park

    def noted(memory: HostMemory, tensor: Tensor) -> Any:
        on_device.append(weakref.ref(tensor.untyped_storage()))
        return park(memory, tensor)

    monkeypatch.setattr(HostMemory, "park", noted)
    loss = model(**batch_of()).loss
    assert len(on_device) == 2 * 2 * 2 + (4 if segment == 1 else 2 + 2 * 2)
    assert not any(storage() is not None for storage in on_device)
    loss.backward()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", ["apply first", "apply last"])
def test_states_on_the_host_whoever_switches_checkpoints_on(order: str, reentrant: bool) -> None:
    batch = batch_of()
    expected, truth = (step(build("qwen3_5_text", dtype), batch) for dtype in (torch.float32, torch.float64))
    model = build_for_host("qwen3_5_text", 2)
    if order == "apply last":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    seqtile.apply(model, chunk=64, segment=2, offload=True)
    if order == "apply first":
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    assert_all_no_worse(step(model, batch), expected, in_double(truth), factor=4.0, floor=2e-6)
    assert chunks_of(model) == [3] * 4


def test_states_on_the_host_under_adapters_and_accumulation(parked: list[tuple[int, int]]) -> None:
    """Two forwards before a backward, whose states are told apart."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    batches, results = (batch_of(), batch_of(rows=1, tokens=97, seed=2)), list[dict[str, Tensor | None]]()
    for dtype, host in ((torch.float32, False), (torch.float64, False), (torch.float32, True)):
        torch.manual_seed(5)
        model = peft.get_peft_model(build_for_host("qwen3_5_text", 2), lora).to(dtype).train()
        if host:
            seqtile.apply(model, chunk=64, segment=2, offload=True)
        model.zero_grad()
        losses = [model(**batch).loss for batch in batches]
        sum(losses).backward()
        results.append({name: weight.grad for name, weight in model.named_parameters()})
    expected, truth, got = results
    assert_all_no_worse(got, expected, in_double(truth), factor=4.0, floor=2e-6)
    of_states = 2 * (2 * 2 + 1) * STATE_BYTES["qwen3_5_text"]
    inputs_and_keys = (2 * 150 + 97) * (2 * 40 + 2 * 2 * 2 * 16) * 4
    assert sum(nbytes for _, nbytes in parked) == of_states + inputs_and_keys


@pytest.mark.parametrize("tensors", [0, 1, 2, 5])
def test_keys_and_values_without_room_on_the_host_stay_on_the_device(
    tensors: int, parked: list[tuple[int, int]]
) -> None:
    hidden, keys = 2 * 150 * 40 * 4, 2 * 150 * 2 * 16 * 4
    sizes = [hidden, keys, keys, hidden, keys, keys]
    model = build_for_host("llama", 2)
    seqtile.apply(model, chunk=64, segment=2, offload=f"{sum(sizes[:tensors]) + 64}B")
    torch.testing.assert_close(step(model, batch_of()), step(build("llama"), batch_of()), rtol=1e-4, atol=1e-6)
    assert [nbytes for _, nbytes in parked] == sizes[:tensors]


@pytest.mark.parametrize(("family", "moved"), [("llama", 1 + 2 * 3), ("qwen3_5_text", 1 + 2 * 2 + 2 * 2 * 2)])
def test_a_retained_graph_reads_from_the_host_again(family: str, moved: int, parked: list[tuple[int, int]]) -> None:
    model = build_for_host(family, 4)
    seqtile.apply(model, chunk=64, segment=4, offload=True)
    loss, weight = model(**batch_of()).loss, model.model.layers[1].self_attn.k_proj.weight
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second) and len(parked) == moved


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_host_that_is_too_small_for_keys_and_values_is_refused_at_the_first_segment(
    family: str, parked: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two segments' inputs fit, and are not counted as four layers'. States are refused before one is copied."""
    hidden, keys = 2 * 150 * 40 * 4, 2 * 150 * 2 * 16 * 4
    states = 2 * 2 * STATE_BYTES.get(family, 0)
    model = build_for_host(family, 2)
    seqtile.apply(model, chunk=64, segment=2, offload=True)
    room = 2 * (hidden + states - 1 if states else hidden + 2 * keys - 1)
    monkeypatch.setattr(host_offload, "available_host_bytes", lambda: room)
    with refused("offload.exceeds-host-memory"):
        step(model, batch_of())
    assert [nbytes for _, nbytes in parked] == [hidden]
    monkeypatch.setattr(host_offload, "available_host_bytes", lambda: 2 * (hidden + states + 2 * keys))
    step(model, batch_of())


def test_frozen_weights_come_from_the_host_once_per_pass() -> None:
    """Not once per chunk."""
    peft = pytest.importorskip("peft")
    batch, results = batch_of(), list[dict[str, Tensor | None]]()
    lora = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    for dtype, host in ((torch.float32, False), (torch.float64, False), (torch.float32, True)):
        torch.manual_seed(5)
        model = peft.get_peft_model(build("llama"), lora).to(dtype).train()
        if host:
            seqtile.apply(model, chunk=64, offload="checkpoints+weights")
            step(model, batch)
            stream = installed_host_weights(model)[0].stream
            before, layers = stream.fetched_bytes, sum(layer.nbytes for layer in stream.layers)
        results.append(step(model, batch))
    expected, truth, got = results
    assert_all_no_worse(got, expected, in_double(truth), factor=4.0, floor=2e-6)
    assert stream.fetched_bytes - before == 2 * layers and chunks_of(model) == [3] * 4


def test_memory_is_bounded_by_the_chunk() -> None:
    """Beyond checkpoints a step takes what one chunk takes, and one layer's keys, values and their gradients."""

    def peak(**settings: Any) -> int:
        model = build("llama", max_position_embeddings=2048)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        seqtile.apply(model, blocks="none", loss="tiled", loss_tile=64, **settings)
        step(model, batch_of(1, 200))
        for weight in model.parameters():
            weight.grad = torch.zeros_like(weight)
        with count_live_bytes("cpu") as live:
            model(**batch_of(1, 1024)).loss.backward()
        return live.peak

    hidden_states = 1024 * SIZES["hidden_size"] * 4
    keys_and_values = 1024 * 2 * 2 * 16 * 4
    whole, in_chunks = peak(), peak(chunk=128)
    # Four layers' inputs, the last one's output, and two gradients of them; keys, values, and their gradients.
    assert in_chunks < 8 * hidden_states + 2 * keys_and_values + 2**20
    assert in_chunks < 0.6 * whole


def test_generation_evaluation_and_training_mode_without_gradients_are_left_alone() -> None:
    model = build("llama")
    ids = batch_of(1, 90)["input_ids"]
    model.eval()
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        logits = model(ids).logits
    seqtile.apply(model, chunk=64, segment=2)
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
    torch.testing.assert_close(model(ids).logits, logits)
    model.train()
    with torch.no_grad():
        assert torch.equal(model.eval()(ids).logits, logits)
        model.train()
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), expected)
        torch.testing.assert_close(model(ids, use_cache=False).logits, logits)
    assert model.config._attn_implementation == "sdpa"
    seqtile.undo(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


def test_a_copied_model_runs_its_own_layers() -> None:
    model = build("llama")
    seqtile.apply(model, chunk=64, segment=2)
    batch = batch_of()
    expected = step(model, batch)
    copied = copy.deepcopy(model)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    torch.testing.assert_close(step(copied, batch), expected)


def test_attention_dropout_runs_whole_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = build("llama", attention_dropout=0.2)
    seqtile.apply(model, chunk=64)
    step(model, batch_of())
    assert chunks_of(model) == [0] * 4
    assert "attention dropout" in caplog.text
    assert caplog.text.count("attention dropout") == 4 + 1  # each layer, and the option


def test_the_report_recommends_nothing_that_is_refused_beside_chunks() -> None:
    notes = []
    for chunk in (None, 64):
        model = build("llama")
        model.gradient_checkpointing_enable({"use_reentrant": False})
        notes.append(" ".join(seqtile.apply(model, chunk=chunk).notes))
    assert "attention-saved" in notes[0] and "attention-saved" not in notes[1]


def test_left_padding_under_eager_attention() -> None:
    """The mask is added there: the lowest number hides a key from the softmax, and not from a log-sum-exp."""
    batch = batch_of(padded="left")
    batch["labels"] = torch.where(batch["attention_mask"] == 0, -100, batch["input_ids"])
    how = dict(attn_implementation="eager")
    expected = step(build("llama", **how), batch)
    truth = in_double(step(build("llama", **how), batch))  # in float64 its softmax in fp32 overflows
    model = build("llama", **how)
    seqtile.apply(model, chunk=64)
    assert_all_no_worse(step(model, batch), expected, truth, factor=4.0, floor=2e-6)


@pytest.mark.parametrize("family", ["deepseek_v32", "glm_moe_dsa"])
def test_an_indexer_keeps_its_layer_whole(family: str, caplog: pytest.LogCaptureFixture) -> None:
    """It selects all tokens of a short trial, so that a trial would tell nothing of longer sequences."""
    settings = {**FAMILIES["deepseek_v3"], "index_n_heads": 3, "index_head_dim": 16, "index_topk": 200}
    if family == "glm_moe_dsa":
        settings["indexer_types"] = ["full", "shared"] * 2  # a shared layer is handed what the one before it selected
    batch = batch_of()
    expected = step(build(family, **settings), batch)
    model = build(family, **settings)
    seqtile.apply(model, chunk=64)
    torch.testing.assert_close(step(model, batch), expected, rtol=1e-4, atol=1e-6)
    assert chunks_of(model) == [0] * 4 and "Indexer" in caplog.text
    assert ("another layer selected" in caplog.text) == (family == "glm_moe_dsa")


@pytest.mark.parametrize("shape", ["one per token", "one per pair of tokens"])
def test_an_argument_that_looks_like_a_mask_is_none(shape: str) -> None:
    """Attention sees what the layer gives it as its mask, whatever else goes through the layer."""
    ids = batch_of(1, 300)["input_ids"]
    marked = torch.ones(1, 300, dtype=torch.bool) if shape == "one per token" else visible_to(300)[None, None].clone()
    marked[..., 100:200] &= torch.eye(300, dtype=torch.bool)[:, 100:200] if marked.dim() == 4 else False
    batch = dict(
        input_ids=ids, labels=ids, marked=marked if shape == "one per token" else marked.expand(1, 1, 300, 300)
    )
    expected, truth = step(build("llama"), batch), in_double(step(build("llama", torch.float64), batch))
    model = build("llama")
    seqtile.apply(model, chunk=64)
    assert_all_no_worse(step(model, batch), expected, truth, factor=4.0, floor=2e-6)
    assert chunks_of(model) == [5] * 4


def test_a_mask_that_is_written_to_is_read_again() -> None:
    ids = batch_of(1)["input_ids"]
    mask = visible_to(150)[None, None].clone()
    model, whole = build("llama"), build("llama")
    seqtile.apply(model, chunk=64)
    for _ in range(2):
        batch = dict(input_ids=ids, labels=ids, attention_mask=mask)
        torch.testing.assert_close(step(model, batch), step(whole, batch), rtol=1e-4, atol=1e-6)
        mask[..., 70:, :70] = False  # two documents


def test_another_attention_implementation_is_tried_again() -> None:
    def doubled(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> Any:
        repeat = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(repeat, 1) for x in (k, v))
        return 2 * F.scaled_dot_product_attention(q, keys, values, is_causal=True).transpose(1, 2), None

    transformers.AttentionInterface.register("doubled", doubled)
    model, batch = build("llama"), batch_of()
    seqtile.apply(model, chunk=64)
    step(model, batch)
    model.set_attn_implementation("doubled")
    whole = build("llama")
    whole.set_attn_implementation("doubled")
    torch.testing.assert_close(step(model, batch), step(whole, batch))


@pytest.mark.parametrize("segment", [1, 2])
def test_keys_and_values_are_released_after_the_backward(segment: int) -> None:
    """Also of an attention without a gradient, as under frozen layers of which the MLP trains."""
    model = build("llama")
    model.requires_grad_(False)
    for layer in model.model.layers:
        layer.mlp.requires_grad_(True)
    seqtile.apply(model, chunk=64, segment=segment)
    buffers, write = list[weakref.ref[Tensor]](), KeyValues.write

    def note(*args: Any) -> tuple[Tensor, Tensor]:
        written = write(*args)
        buffers.extend(map(weakref.ref, written))
        return written

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeyValues, "write", note)
        loss = model(**batch_of()).loss
        loss.backward()
    assert buffers and not any(buffer() is not None for buffer in buffers)


def test_padding_longer_than_a_chunk() -> None:
    ids = batch_of(1)["input_ids"]
    mask, labels = torch.ones_like(ids), ids.clone()
    mask[:, :100] = 0
    labels[:, :101] = -100
    batch = dict(input_ids=ids, labels=labels, attention_mask=mask)
    expected, truth = step(build("llama"), batch), in_double(step(build("llama", torch.float64), batch))
    model = build("llama")
    seqtile.apply(model, chunk=64)
    assert_all_no_worse(step(model, batch), expected, truth, factor=4.0, floor=2e-6)
    assert chunks_of(model) == [3] * 4


@pytest.mark.parametrize(("crosses", "chunks"), [(False, 3), (True, 0)])
def test_tokens_that_see_later_ones(crosses: bool, chunks: int, caplog: pytest.LogCaptureFixture) -> None:
    """A block of tokens that see each other, as those of a picture: in one chunk, or across the end of one."""
    ids = batch_of(1)["input_ids"]
    mask = visible_to(150)
    block = slice(60, 70) if crosses else slice(70, 80)
    mask[block, block] = True
    batch = dict(input_ids=ids, labels=ids, attention_mask=mask[None, None])
    expected, truth = step(build("llama"), batch), in_double(step(build("llama", torch.float64), batch))
    model = build("llama")
    seqtile.apply(model, chunk=64)
    assert_all_no_worse(step(model, batch), expected, truth, factor=4.0, floor=2e-6)
    assert chunks_of(model) == [chunks] * 4
    assert ("later chunks" in caplog.text) == crosses


@pytest.mark.parametrize("segment", [1, 2, 4])
def test_weights_that_layers_share_get_one_gradient(segment: int) -> None:
    def shared(dtype: torch.dtype = torch.float32) -> Any:
        model = build("llama", dtype)
        layers = model.model.layers
        layers[1].mlp.up_proj = layers[0].mlp.up_proj
        layers[3].self_attn.q_proj.weight = layers[2].self_attn.q_proj.weight = layers[0].self_attn.q_proj.weight
        return model

    batch = batch_of()
    truth, whole, model = in_double(step(shared(torch.float64), batch)), step(shared(), batch), shared()
    seqtile.apply(model, chunk=64, segment=segment)
    assert_all_no_worse(step(model, batch), whole, truth, factor=4.0, floor=2e-6)
    assert chunks_of(model) == [3] * 4


@pytest.mark.parametrize("blocks", ["none", "auto"])
def test_verify_compares_chunks(blocks: str) -> None:
    """What is counted as cut is the layers, whose blocks are not cut again."""
    model = build("llama")
    seqtile.apply(model, chunk=64, segment=2, blocks=blocks)
    result = seqtile.verify(model, batch_of())
    assert result.ok and (result.ran.blocks, result.ran.cut, result.ran.tiles) == (4, 4, 3), result
    assert not seqtile.verify(model, batch_of(tokens=60)).ok  # one chunk proves nothing
    store = KeyValues.gradients
    with pytest.MonkeyPatch.context() as patched:  # gradients of earlier chunks' keys are lost
        patched.setattr(KeyValues, "gradients", lambda self, end: [x.zero_() for x in store(self, end)])
        assert not seqtile.verify(model, batch_of()).ok
    seqtile.undo(model)


WITHIN = {"inside it": ".mlp", "on it": ""}


@pytest.mark.parametrize("hooked", WITHIN)
@pytest.mark.parametrize("segment", [2, 3, 4])
def test_a_layer_with_hooks_runs_by_itself_or_its_segment_is_refused(segment: int, hooked: str) -> None:
    """Its neighbours still run, and hooks see what they see in the whole model."""

    def run(number: int, segment: int | None) -> tuple[dict[str, Tensor | None], list[Tensor]]:
        model, seen = build("llama"), list[Tensor]()
        if segment is not None:
            seqtile.apply(model, chunk=64, segment=segment)
        module = model.get_submodule(f"model.layers.{number}{WITHIN[hooked]}")

        def look(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            seen.append(output.detach())
            return 0.5 * output

        module.register_forward_hook(look)
        return step(model, batch_of()), seen

    ran = 0
    for number in range(4):
        expected, seen = run(number, None)
        try:
            got, seen_in_chunks = run(number, segment)
        except UserError as error:
            assert number % segment, error
            continue
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(seen_in_chunks, seen)
        ran += 1
    assert ran == -(-4 // segment)


def test_hidden_states_that_change_between_layers_of_a_segment_are_refused() -> None:
    model = build("llama")
    seqtile.apply(model, chunk=64, segment=2)
    hook = model.model.layers[1].register_forward_pre_hook(lambda layer, args: (args[0] + 1, *args[1:]))
    with refused("segment.layers-apart", "segment=2", "model.layers.1"):
        step(model, batch_of())
    hook.remove()
    step(model, batch_of())  # nothing is left of the refused call


def test_a_layer_that_the_model_skips_is_refused_in_a_segment() -> None:
    model = build("llama")
    seqtile.apply(model, chunk=64, segment=2)
    layers = model.model.layers
    model.model.layers = nn.ModuleList([layers[0], layers[2], layers[3]])
    model.config.num_hidden_layers = 3
    with refused("segment.layers-apart", "model.layers.0", "were not called"):
        step(model, batch_of())
    model.model.layers = layers[:3]
    with refused("segment.layers-apart", "model.layers.2", "were not called"):  # nothing behind it
        step(model, batch_of())
    seqtile.undo(model)
    assert not model.model._forward_hooks
    seqtile.apply(model, chunk=64, segment=2)
    model.model.layers, model.config.num_hidden_layers = layers, 4
    step(model, batch_of())


def test_an_exception_in_a_segment_leaves_nothing_behind() -> None:
    model = build("llama")
    seqtile.apply(model, chunk=64, segment=2)

    def fail(*_: Any) -> None:
        raise KeyError("stop")

    hook = model.model.layers[1].register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        step(model, batch_of())
    hook.remove()
    expected = step(build("llama"), batch_of())
    torch.testing.assert_close(step(model, batch_of()), expected, rtol=1e-4, atol=1e-6)


# ---- the operator ----


def qkv(dtype: torch.dtype, heads: int = 6, keys: int = 2, tokens: int = 90, width: int = 8, value: int = 8) -> Any:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, heads, tokens, width), (2, keys, tokens, width), (2, keys, tokens, value), (2, heads, tokens, value))
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu") for shape in shapes]
    q, k, v, upstream = (x.to(torch.get_default_device(), dtype) for x in drawn)
    return [x.requires_grad_() for x in (q, k, v)], upstream


def attention_in_chunks(q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, ...], **how: Any) -> Tensor:
    store, outputs, start = KeyValues(q.shape[2]), [], 0
    arguments = {name: how.pop(name) for name in ("window", "mask", "padding") if name in how}
    for size in sizes:
        visible = Visible(0, start, start + size, **arguments)
        parts = [x[:, :, start : start + size] for x in (q, k, v)]
        outputs.append((parts, visible, store))
        start += size
    return _Chain.apply(outputs, how, q, k, v)


class _Chain(torch.autograd.Function):
    """Chunks forward in order and backward in reverse, as the tiles of a layer run."""

    @staticmethod
    def forward(ctx: Any, chunks: Any, how: Any, *qkv: Tensor) -> Tensor:
        ctx.chunks, ctx.how, ctx.graphs = chunks, how, []
        for parts, visible, store in chunks:
            leaves = [part.detach().requires_grad_() for part in parts]
            with torch.enable_grad():
                ctx.graphs.append((leaves, prefix_attention(*leaves, store, visible, scale=0.3, **how)))
        return torch.cat([output.detach() for _, output in ctx.graphs], 2)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        gradients: list[Any] = []
        end = upstream.shape[2]
        for leaves, output in reversed(ctx.graphs):
            grad = upstream[:, :, end - output.shape[2] : end]
            end -= output.shape[2]
            gradients.insert(0, torch.autograd.grad(output, leaves, grad))
        return None, None, *(torch.cat([grads[n] for grads in gradients], 2) for n in range(3))


def visible_to(tokens: int, window: int | None = None) -> Tensor:
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    return (distance >= 0) & (distance < (window or tokens))


def plain_attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, softcap: float = 0.0, sinks: Tensor | None = None
) -> Tensor:
    repeat = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(repeat, 1).mT * 0.3
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks[None, :, None, None].expand(*scores.shape[:3], 1).to(scores.dtype)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return weights @ v.repeat_interleave(repeat, 1)


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix, "KEYS_AT_ONCE", 16)
    monkeypatch.setattr(prefix, "MASKED_KEYS", 12)
    monkeypatch.setattr(prefix, "WINDOWED_QUERIES", 10)


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "window": {"window": 11},
    "soft cap": {"softcap": 1.5},
    "mask": {"masked": True},
    "padding": {"padded": True},
    "window and padding": {"window": 17, "padded": True},
}


@pytest.mark.usefixtures("_small_pieces")
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("value_width", [8, 5])
@pytest.mark.parametrize("case", CASES)
def test_pieces_join_to_one_softmax(case: str, value_width: int, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64 to rounding, by the CPU's kernel and by plain products, whatever the chunks."""
    if plain:
        monkeypatch.setattr(piece_kernels, "_kernel", lambda *_: Plain)
    how = dict(CASES[case])
    tokens = 90
    seen = visible_to(tokens, how.get("window")).expand(2, 1, tokens, tokens)
    if how.pop("masked", False):
        documents = torch.tensor([0] * 37 + [1] * 53)
        seen = seen & (documents[:, None] == documents)
        how["mask"] = GivenMask(seen)
    if how.pop("padded", False):
        padding = torch.ones(2, tokens, dtype=torch.bool)
        padding[0, :40] = False
        how["padding"] = padding
        seen = seen & (padding[:, None, None] | torch.eye(tokens, dtype=torch.bool))
    inputs, upstream = qkv(torch.float64, value=value_width)
    expected = plain_attention(*inputs, seen, how.get("softcap", 0.0))
    truth = torch.autograd.grad(expected, inputs, upstream)
    for sizes in ((90,), (30, 30, 30), (1, 64, 25), (17,) * 5 + (5,)):
        got = attention_in_chunks(*inputs, sizes, **how)
        torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
        for gradient, reference in zip(torch.autograd.grad(got, inputs, upstream), truth, strict=True):
            torch.testing.assert_close(gradient, reference, rtol=1e-9, atol=1e-11)


def test_a_sink_joins_each_row_once() -> None:
    inputs, upstream = qkv(torch.float64)
    sinks = torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    expected = plain_attention(*inputs, visible_to(90), sinks=sinks)
    store, start, total = KeyValues(90), 0, torch.zeros_like(sinks)
    outputs = []
    for size in (40, 50):
        parts = [x[:, :, start : start + size].detach().requires_grad_() for x in inputs]
        visible = Visible(0, start, start + size)
        outputs.append((parts, prefix_attention(*parts, store, visible, scale=0.3, sinks=sinks), start))
        start += size
    torch.testing.assert_close(torch.cat([output for _, output, _ in outputs], 2), expected)
    for parts, output, first in reversed(outputs):
        grad = upstream[:, :, first : first + output.shape[2]]
        total += torch.autograd.grad(output, [*parts, sinks], grad)[-1]
    torch.testing.assert_close(total, torch.autograd.grad(expected, sinks, upstream)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_joined_pieces_are_as_exact_as_one_kernel(dtype: torch.dtype) -> None:
    inputs, upstream = qkv(dtype, tokens=1024, width=16, value=16)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = plain_attention(*exact, visible_to(1024))
    truths = torch.autograd.grad(truth, exact, upstream.double())
    untiled = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3, enable_gqa=True)
    expected = torch.autograd.grad(untiled, inputs, upstream)
    got = attention_in_chunks(*inputs, (64,) * 16)
    assert_no_worse(got, untiled, truth)
    for one, other, exactly in zip(torch.autograd.grad(got, inputs, upstream), expected, truths, strict=True):
        assert_no_worse(one, other, exactly)


@pytest.mark.backward_here  # autocast is of a thread
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_autocast_rounds_no_product_of_a_piece(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_kernels, "_kernel", lambda *_: Plain)
    inputs, upstream = qkv(torch.float32)

    def run(*inside: str) -> tuple[Tensor, ...]:
        device = inputs[0].device.type
        with torch.autocast(device, torch.bfloat16, enabled="forward" in inside):
            output = attention_in_chunks(*inputs, (50, 40))
        with torch.autocast(device, torch.bfloat16, enabled="backward" in inside):
            return output, *torch.autograd.grad(output, inputs, upstream)

    torch.testing.assert_close(run(where), run(), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["CuDnn", "Flash", "Plain"])
@pytest.mark.parametrize("width", [64, 128])
def test_kernels_of_a_gpu_join(kernel: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(piece_kernels, "_kernel", lambda *_: getattr(piece_kernels, kernel))
    inputs, upstream = qkv(torch.bfloat16, heads=8, tokens=1536, width=width, value=width)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    truth = plain_attention(*exact, visible_to(1536))
    truths = torch.autograd.grad(truth, exact, upstream.double())
    untiled = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=0.3, enable_gqa=True)
    expected = torch.autograd.grad(untiled, inputs, upstream)
    got = attention_in_chunks(*inputs, (512,) * 3)
    assert_no_worse(got, untiled, truth)
    for one, other, exactly in zip(torch.autograd.grad(got, inputs, upstream), expected, truths, strict=True):
        assert_no_worse(one, other, exactly)


def test_no_mask_of_a_chunk_and_all_tokens_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    biases = []
    forward = piece_kernels.forward

    def seen(q: Tensor, k: Tensor, v: Tensor, piece: Piece) -> Any:
        biases.append(None if piece.bias is None else piece.bias.shape)
        return forward(q, k, v, piece)

    monkeypatch.setattr(piece_kernels, "forward", seen)
    monkeypatch.setattr(prefix, "MASKED_KEYS", 32)
    inputs, _ = qkv(torch.float32)
    attention_in_chunks(*inputs, (30, 30, 30))
    assert biases == [None] * 5
    biases.clear()
    padding = torch.ones(2, 90, dtype=torch.bool)
    padding[0, :7] = False
    attention_in_chunks(*inputs, (45, 45), padding=padding)
    assert max(shape[-1] for shape in biases) <= 32


@pytest.mark.parametrize(("tokens", "batch", "chunk", "sizes"), [
    (150, 1, 64, (64, 64, 22)), (150, 1, 70, (128, 22)), (20, 1, 7, (7, 7, 6)), (20_000, 1, "auto", (8192, 8192, 3616)),
    (20_000, 4, "auto", (2048,) * 9 + (1568,)), (65, 1, 64, (63, 2)),
])  # fmt: skip
def test_chunk_sizes(tokens: int, batch: int, chunk: int | str, sizes: tuple[int, ...]) -> None:
    assert chunk_sizes(tokens, batch, chunk).sizes == sizes


def test_kernels_exist() -> None:
    assert has_kernel("aten::_scaled_dot_product_flash_attention_for_cpu_backward", "CPU")


ROUTED: dict[str, dict[str, Any]] = {
    "mixtral": dict(num_local_experts=6, num_experts_per_tok=2),
    "qwen3_moe": {**EXPERTS, "mlp_only_layers": [1]},
    "olmoe": dict(num_experts=6, num_experts_per_tok=2, head_dim=10),
    "gpt_oss": {**FAMILIES["gpt_oss"], "attn_implementation": "eager"},
}
BALANCED: dict[str, Any] = dict(output_router_logits=True, router_aux_loss_coef=3.0)


def build_routed(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """With experts one after another, which take float64 too."""
    model = build(family, dtype, **{**ROUTED[family], **BALANCED, **changes})
    model.set_experts_implementation("eager")
    return model


@pytest.mark.skipif(not CAPTURES, reason=f"transformers {transformers.__version__} records outputs without hooks")
@pytest.mark.parametrize("segment", [1, 2, 4])
@pytest.mark.parametrize(
    ("family", "padded"),
    [(family, padded) for family in ROUTED for padded in ("", "left", "right") if not padded or family != "gpt_oss"],
)
def test_balance_losses_are_those_of_all_tokens(
    family: str, padded: str, segment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the mean of the chunks': how often an expert is chosen is multiplied by its mean probability."""
    batch, exact = batch_of(padded=padded), torch.float32 if family == "gpt_oss" else torch.float64
    whole, model = build_routed(family), build_routed(family)
    expected, truth = step(whole, batch), in_double(step(build_routed(family, exact), batch))
    assert not torch.allclose(expected["loss"], step(build_routed(family, router_aux_loss_coef=0.0), batch)["loss"])
    model.gradient_checkpointing_enable({"use_reentrant": False})
    seqtile.apply(model, chunk=64, segment=segment, loss="tiled" if segment == 2 else None)
    got = step(model, batch)
    assert chunks_of(model) == [3] * 4
    assert_all_no_worse(got, expected, truth, factor=4.0, floor=2e-6)
    logits, other = (m(**batch).router_logits for m in (model, whole))
    assert [x.shape for x in logits] == [x.shape for x in other]
    for one, reference in zip(logits, other, strict=True):
        torch.testing.assert_close(one, reference)
    capture = segment_module.capture_router_logits
    monkeypatch.setattr(segment_module, "capture_router_logits", lambda logits: capture(x.detach() for x in logits))
    with pytest.raises(AssertionError):
        assert_all_no_worse(step(model, batch), expected, truth, factor=4.0, floor=2e-6)


@pytest.mark.skipif(not CAPTURES, reason=f"transformers {transformers.__version__} records outputs without hooks")
@pytest.mark.parametrize("segment", [1, 2])
def test_router_logits_cost_no_product_and_a_router_runs_once_for_each_token(segment: int) -> None:
    counted = []
    for captures in (False, True):
        model = build_routed("qwen3_moe", output_router_logits=captures)
        seqtile.apply(model, chunk=64, segment=segment, loss="tiled")
        step(model, batch_of())
        with count_products() as products:
            output = model(**batch_of())
            output.loss.backward()
        counted.append(products.flops)
    assert counted[0] == counted[1]
    assert [len(logits) for logits in output.router_logits] == [2 * 150] * 3


@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("how", ["reentrant checkpoints" if CAPTURES else "router logits", "attentions"])
def test_calls_whose_records_chunks_would_change_run_whole(
    how: str, checkpoints: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """In their recompute too, where nothing is recorded."""
    changes = dict(attn_implementation="eager", output_attentions=True) if how == "attentions" else {}
    batch, model, whole = batch_of(), *(build_routed("mixtral", **changes) for _ in range(2))
    if checkpoints or how == "reentrant checkpoints":
        for each in (model, whole):
            each.gradient_checkpointing_enable({"use_reentrant": how == "reentrant checkpoints"})
    expected = step(whole, batch)
    seqtile.apply(model, chunk=64, blocks="none")
    torch.testing.assert_close(step(model, batch), expected)
    assert chunks_of(model) == [0] * 4 and "runs whole" in caplog.text


@pytest.mark.skipif(not CAPTURES, reason=f"transformers {transformers.__version__} records outputs without hooks")
@pytest.mark.parametrize("segment", [1, 2])
def test_recorded_hidden_states_are_those_of_whole_layers(segment: int) -> None:
    """They are recorded outside the layers, each of which then runs by itself."""
    batch, model, whole = batch_of(), *(build_routed("mixtral", output_hidden_states=True) for _ in range(2))
    expected, truth = step(whole, batch), in_double(step(build_routed("mixtral", torch.float64), batch))
    seqtile.apply(model, chunk=64, segment=segment)
    assert_all_no_worse(step(model, batch), expected, truth, factor=4.0, floor=2e-6)
    assert chunks_of(model) == [3] * 4
    recorded, reference = (m(**batch).hidden_states for m in (model, whole))
    for one, other in zip(recorded, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
