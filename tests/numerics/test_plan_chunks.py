"""Plans of steps whose decoder layers run in chunks, against real steps on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig

from seqtile import apply
from seqtile._compat import checkpoints_in_forward
from seqtile.checkpointing.host_offload import HostMemory
from seqtile.counting.products import count_products
from seqtile.options import TilingOptions, changed
from seqtile.planner.accelerators import Device
from seqtile.planner.extrapolate import Lines, predict
from seqtile.planner.fake_step import build, fake_step, real_step
from seqtile.planner.kernel_workspace import cpu_workspace
from seqtile.planner.live_at_peaks import CHECKPOINTS, CHUNK_STATES, KERNELS, KEY_GRADIENTS, KEYS, PIECE_GRADIENTS
from seqtile.planner.memory_plan import Planner
from seqtile.planner.phases import Phase
from seqtile.planner.request import Request
from seqtile.planner.step_config import Lora, Setup
from seqtile.planner.step_time import checkpoint_bytes
from seqtile.recognise.decoder_layers import decoder_layers

pytestmark = pytest.mark.backward_here  # a counter sees the operators of its own thread

SIZES: dict[str, Any] = dict(
    vocab_size=144, hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=24,
    max_position_embeddings=8192,
)  # fmt: skip
OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_5_text": dict(
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=18, linear_value_head_dim=20
    ),
    "mixtral": dict(num_local_experts=6, num_experts_per_tok=2, output_router_logits=True),
}  # fmt: skip

STATE_BYTES = 4 * (4 * 18 * 20 + (2 * 2 * 18 + 4 * 20) * 4)  # of the delta rule, and of the convolution


def config_of(family: str, layers: int) -> Any:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers has no {family}")
    return AutoConfig.for_model(family, num_hidden_layers=layers, **SIZES | OF_FAMILY.get(family, {}))


def setup_of(segment: int, chunk: int = 64, **changes: Any) -> Setup:
    options = TilingOptions(loss="tiled", loss_tile=64, checkpoint="layer", chunk=chunk, segment=segment)
    return changed(Setup(dtype=torch.float32, attention="sdpa", options=options), **changes)


@pytest.mark.parametrize(
    ("family", "layers", "segment", "tokens", "changes"),
    [
        ("llama", 6, 1, 384, {}),
        ("llama", 6, 2, 300, dict(lora=Lora(4))),  # a last chunk that is shorter
        ("llama", 4, 2, 384, dict(attention="eager")),  # a mask of the whole sequence
        ("mixtral", 6, 2, 384, {}),
        pytest.param("llama", 12, 2, 384, {}, marks=pytest.mark.slow),
        pytest.param("llama", 24, 4, 320, dict(batch=2), marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", 16, 1, 384, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", 24, 4, 384, dict(lora=Lora(4)), marks=pytest.mark.slow),
    ],
)
def test_a_step_in_chunks_holds_what_is_planned(
    family: str, layers: int, segment: int, tokens: int, changes: dict[str, Any]
) -> None:
    """Within the bounds of other plans: 1 %, and no more than 0.5 % too low."""
    config, setup = config_of(family, layers), setup_of(segment, **changes)
    planned = predict(config, setup, tokens, workspace=cpu_workspace, device_type="cpu")
    assert planned.setup.options.chunk == 64 and tokens not in planned.lengths
    real = real_step(config, setup, tokens)
    assert -0.005 <= planned.peak / real.peak - 1 <= 0.01


def test_fake_and_real_steps_in_chunks_hold_the_same_bytes_under_their_names() -> None:
    config, setup = config_of("qwen3_5_text", 4), setup_of(2)
    tokens = 384  # so many that the step takes more than the trial of its first layers
    fake, real = (step(config, setup, tokens) for step in (fake_step, real_step))
    assert fake.peak == real.peak
    terms = [peak.terms for peak in fake.peaks.values()]
    largest = {
        name: max(term.get(name, 0) for term in terms) for name in (CHECKPOINTS, KEYS, KEY_GRADIENTS, CHUNK_STATES)
    }
    inputs = tokens * 64 * 4
    assert largest[CHECKPOINTS] == 2 * inputs  # of two segments
    assert largest[KEYS] == largest[KEY_GRADIENTS] == tokens * 2 * 2 * 24 * 4  # of the layer that attends
    assert largest[CHUNK_STATES] >= 5 * 3 * STATE_BYTES  # three layers, at the starts of all chunks but the first


@pytest.mark.parametrize(
    ("family", "segment", "room"),
    [
        ("llama", 4, None),
        pytest.param("llama", 1, None, marks=pytest.mark.slow),
        pytest.param("llama", 2, None, marks=pytest.mark.slow),
        pytest.param("llama", 2, 700_000, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", 2, None, marks=pytest.mark.slow),
    ],
)
def test_a_plan_counts_what_a_step_in_chunks_moves_to_the_host(
    family: str, segment: int, room: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And takes it off the device, but for two segments' in flight, and what is computed again."""
    tokens, layers, config, moved = 384, 8, config_of(family, 8), [0]
    options = TilingOptions(loss="tiled", loss_tile=64, checkpoint="layer", chunk=64, segment=segment)
    options = replace(options, offload=True if room is None else f"{room}B")
    planner = Planner(Request("it", config, Device("cpu", 2**40, None, ""), options=options, precision="float32",
                              attention="sdpa", device_type="cpu", lora=Lora(4)))  # fmt: skip
    planned, park = planner.estimate(tokens), HostMemory.park

    def counted(memory: HostMemory, tensor: Any) -> Any:
        moved[0] += tensor.nbytes
        return park(memory, tensor)

    monkeypatch.setattr(HostMemory, "park", counted)
    model = build(config, planner.setup, "cpu").model
    if segment > 1 and not checkpoints_in_forward(model.get_submodule(decoder_layers(model)[0].name)):
        pytest.skip("this transformers checkpoints each layer, and a segment keeps its input")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    apply(model, chunk=64, segment=segment, loss="tiled", offload=options.offload)
    ids = torch.zeros(1, tokens, dtype=torch.long)
    model(input_ids=ids, labels=ids).loss.backward()

    segments, of_layer = layers // segment, tokens * 2 * 2 * 24 * 4
    attentions, again = (2, 0) if family == "qwen3_5_text" else (8, of_layer)
    inputs = segments * tokens * 64 * 4
    keys = attentions * of_layer - segments * again
    states = 6 * 5 * STATE_BYTES if family == "qwen3_5_text" else 0  # at the starts of all chunks but the first
    assert checkpoint_bytes(planner.request, planner.counts, tokens) == inputs + keys
    on_host = {name: planned.host_terms.get(name, 0) for name in (CHECKPOINTS, KEYS, CHUNK_STATES)}
    kept = inputs + keys + states
    if room is None:
        expected = {CHECKPOINTS: inputs, KEYS: keys, CHUNK_STATES: states}
        assert (on_host, planned.moved, moved[0]) == (expected, 1, kept)
    else:  # whole segments by the plan, and tensors in a step
        assert moved[0] - kept / segments <= sum(on_host.values()) <= moved[0] <= room < kept
    left, flight = 1 - planned.moved, 2 / segments
    assert planned.terms[CHECKPOINTS] == pytest.approx(min(1, left + flight) * inputs)
    assert planned.terms[KEYS] == pytest.approx(min(1, left + flight) * keys + again)
    one_more = planned.terms.get(CHUNK_STATES, 0) - min(1, left + flight) * states
    assert 0 <= one_more <= segment * STATE_BYTES if states else not one_more  # those after a chunk


def test_a_single_chunk_is_planned_as_the_layers_whole() -> None:
    config = config_of("llama", 4)
    planned = [
        predict(config, setup, 256, workspace=cpu_workspace, device_type="cpu")
        for setup in (setup_of(1, chunk=256), changed(setup_of(1), chunk=None))
    ]
    assert planned[0] == planned[1]


@pytest.mark.parametrize("segment", [1, 2])
def test_a_sequence_shorter_than_a_chunk_is_planned(segment: int) -> None:
    config, setup = config_of("llama", 4), setup_of(segment, chunk=512)
    planned = predict(config, setup, 200, workspace=cpu_workspace, device_type="cpu")
    assert -0.005 <= planned.peak / real_step(config, setup, 200).peak - 1 <= 0.01
    predict(config, setup, 1, workspace=cpu_workspace, device_type="cpu")


def test_gradients_of_a_piece_of_keys_stop_growing() -> None:
    """Attention reads 65,536 keys at a time, however long the sequence is."""
    phase = Phase("attention", 0, "backward")
    points = {n: {phase: {KEYS: 2.0 * n, PIECE_GRADIENTS: 3.0 * n, KERNELS: 5.0 * n}} for n in (100, 200)}
    lines = Lines(points, bounded=500)
    assert lines.at(400)[phase] == {KEYS: 800, PIECE_GRADIENTS: 1200, KERNELS: 2000}
    assert lines.at(1000)[phase] == {KEYS: 2000, PIECE_GRADIENTS: 1500, KERNELS: 2500}


@pytest.mark.parametrize("segment", [1, 2])
def test_products_of_a_step_in_chunks_are_those_that_are_counted(segment: int) -> None:
    config = config_of("llama", 4)
    options = TilingOptions(blocks="none", checkpoint="layer", chunk=128, segment=segment)
    request = Request("it", config, Device("cpu", 2**40, None, ""), options=options, precision="float32",
                      attention="sdpa", device_type="cpu")  # fmt: skip
    planner = Planner(request)
    model = build(config, changed(request.setup(), loss=None), "cpu").model
    ids = torch.zeros(1, 384, dtype=torch.long)
    model(input_ids=ids, labels=ids)  # tries a layer
    with count_products() as products:
        model(input_ids=ids, labels=ids).loss.backward()
    rotary = 2 * 384 * config.head_dim // 2  # a product of positions and frequencies in earlier transformers
    assert products.flops - planner.work(384).products in (0, rotary)
