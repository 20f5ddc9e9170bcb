"""Predicted against measured: the memory of real training steps on the CPU.

Run it from the repository::

    python benchmarks/plan_accuracy.py                     # all cells, into benchmarks/results; then docs/tables.py
    python benchmarks/plan_accuracy.py --hybrid            # models whose layers carry a state
    python benchmarks/plan_accuracy.py --pictures          # models that read pictures
    python benchmarks/plan_accuracy.py --only llama        # some, printed only
    python benchmarks/plan_accuracy.py --plan              # the plan again, beside what was measured; --hybrid too

Measured is what PyTorch's allocator reports through ``torch.profiler`` (``profile_memory=True``), from before the model
is made to the end of its second step, at its highest within that step. Predicted comes from fake runs at other depths
than the cell's, and at lengths of whole tiles. Nothing is fitted to a measurement.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from torch._C._profiler import RecordScope
from torch.autograd import profiler
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig

from environment import environment, stamp
from seqtile.options import WHOLE_LAYER, TilingOptions
from seqtile.planner.extrapolate import predict
from seqtile.planner.fake_step import build, compute_loss, make_batch, prepare_optimizer, update
from seqtile.planner.kernel_workspace import cpu_workspace
from seqtile.planner.pictures import read_pictures
from seqtile.planner.step_config import Lora, Setup, make_optimizer

ROOT = Path(__file__).parents[1]

COMMON = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 5, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 16384, "pad_token_id": 0,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 32, "tie_word_embeddings": True},
    "phi3": {},
    "gpt2": {"n_embd": 128, "n_layer": 5, "n_head": 4, "n_inner": 512, "n_positions": 16384, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 352, "head_dim": 32},
}  # fmt: skip
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
HYBRIDS: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 4, **_LINEAR},
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 4, **_LINEAR},
    "bamba": {"attn_layer_indices": [1, 3, 5, 7], **_MAMBA},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention"] * 4, "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 352, **_MAMBA,
    },
    "falcon_h1": {"head_dim": 32, "mamba_d_ssm": 256, **_MAMBA},
    "nemotron_h": {
        "layers_block_type": ["mamba", "mlp", "attention", "mlp"] * 2, "head_dim": 32, "mamba_num_heads": 8,
        "mamba_head_dim": 32, "ssm_state_size": 16, "n_groups": 1,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 4, "block_auto_adjust_ff_dim": False},
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"] * 4, "head_dim": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"] * 4, "mlp_layer_types": ["dense"] * 8, "kv_lora_rank": 32,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "head_dim": 32, "num_key_value_heads": 4,
        "linear_num_heads": 4, "linear_head_dim": 32,
    },
    "recurrent_gemma": {
        "lru_width": 128, "head_dim": 32, "attention_window_size": 16384, "block_types": ["recurrent", "attention"],
    },
}  # fmt: skip
"""Models whose layers carry a state, or every other one does."""
_TOWER = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 7, "num_attention_heads": 2,
          "image_size": 56, "patch_size": 14}  # fmt: skip
_PATCHES = {"depth": 7, "hidden_size": 64, "intermediate_size": 176, "num_heads": 2, "patch_size": 14,
            "spatial_merge_size": 2, "temporal_patch_size": 2, "out_hidden_size": 128}  # fmt: skip
_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [6, 5, 5]}
PICTURE_MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", **_TOWER}),
    "gemma3": ({"model_type": "gemma3_text", "head_dim": 32}, {"model_type": "siglip_vision_model", **_TOWER}),
    "qwen2_vl": ({"rope_parameters": _ROTARY}, {**_PATCHES, "embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}),
    "qwen2_5_vl": ({"rope_parameters": _ROTARY}, {**_PATCHES, "fullatt_block_indexes": [3, 6]}),
    "qwen3_vl": (
        {"rope_parameters": _ROTARY, "head_dim": 32},
        {**_PATCHES, "num_position_embeddings": 64, "deepstack_visual_indexes": [1, 4]},
    ),
    "qwen3_5": (
        {"rope_parameters": _ROTARY, "head_dim": 32, "layer_types": ["linear_attention", "full_attention"] * 4,
         "num_hidden_layers": 8, **_LINEAR},
        {**_PATCHES, "num_position_embeddings": 64},
    ),
}  # fmt: skip
"""By type of model that reads pictures: its language model and its vision tower."""
HYBRID_TOKENS = {"recurrent_gemma": 768, "jamba": 768, "kimi_linear": 1536}
"""Shorter rows where the PyTorch path is slow on real tensors; all are whole chunks of a scan, up to which it pads."""
EXPERTS = ("mixtral", "qwen3_moe", "minimax")
LENGTHS = (2500, 3000, 4096)
OPTIMIZERS = ("adamw", "sgd", "adafactor")
PRECISIONS = ("float32", "bfloat16", "autocast")
TILED = TilingOptions(tile=1024, loss="tiled", loss_tile=512, checkpoint="layer")
TECHNIQUES = {
    "none": replace(TILED, loss=None, checkpoint=None).without_blocks(),
    "loss": replace(TILED, checkpoint=None).without_blocks(),
    "loss, checkpoints": TILED.without_blocks(),
    "loss, MLP": replace(TILED, checkpoint=None),
    "loss, MLP, checkpoints": TILED,
    "loss, MLP, attention saved": replace(TILED, checkpoint="attention-saved"),
    "loss, layer, checkpoints": replace(TILED, blocks=WHOLE_LAYER),
    "loss, layer, heads, checkpoints": replace(TILED, blocks=WHOLE_LAYER, heads=1),
    "checkpoints": replace(TILED, loss=None).without_blocks(),
    "MLP": replace(TILED, loss=None, checkpoint=None),
    "MLP, checkpoints": replace(TILED, loss=None),
    "MLP, attention saved": replace(TILED, loss=None, checkpoint="attention-saved"),
}
"""What is in tiles, and what is computed again in the backward."""
ONE_PROJECTION = ("phi3", "gpt2")
"""Models that make query, keys and values in one product, which cannot run on some of its heads."""


@dataclass(frozen=True)
class Cell:
    """One step to predict and to measure.

    Attributes:
        model: a type of :data:`MODELS`, :data:`HYBRIDS` or :data:`PICTURE_MODELS`.
        tokens: of each row.
        technique: one of :data:`TECHNIQUES`.
        lora: adapters instead of every weight.
        optimizer: of :data:`seqtile.planner.step_config.OPTIMIZERS`.
        precision: of the weights, or ``"autocast"``: fp32 weights, bf16 products.
        batch: rows of a micro-batch.
        accumulation: micro-batches per update.
        pictures: in each row, of 224 x 168 pixels where a model takes any size.
    """

    model: str
    tokens: int
    technique: str
    lora: bool
    optimizer: str = "adamw"
    precision: str = "float32"
    batch: int = 1
    accumulation: int = 1
    pictures: int = 0

    def setup(self) -> Setup:
        pictures = read_pictures(self.config(), self.pictures, (224, 168)) if self.pictures else None
        return Setup(
            dtype=torch.bfloat16 if self.precision == "bfloat16" else torch.float32,
            autocast=self.precision == "autocast", options=TECHNIQUES[self.technique],
            lora=Lora(8) if self.lora else None, optimizer=self.optimizer, batch=self.batch,
            accumulation=self.accumulation, pictures=pictures,
        )  # fmt: skip

    def config(self) -> Any:
        if self.pictures:
            text, vision = PICTURE_MODELS[self.model]
            more = {} if "model_type" in text else {"video_token_id": 1001, "vision_start_token_id": 1002}
            text = {**COMMON, "bos_token_id": 1, "eos_token_id": 2, **text}
            one = "image_token_index" if "model_type" in text else "image_token_id"
            more |= {"mm_tokens_per_image": 4} if self.model == "gemma3" else {}
            return AutoConfig.for_model(self.model, text_config=text, vision_config=vision, **{one: 1000, **more})
        known = {"num_hidden_layers": 8, **HYBRIDS[self.model]} if self.model in HYBRIDS else MODELS[self.model]
        return AutoConfig.for_model(self.model, **{**COMMON, **known})


def all_cells() -> list[Cell]:
    """Every technique on every model; all else is spread evenly over them, in an order that a fixed seed shuffles."""
    every = [
        (model, technique)
        for model in MODELS
        for technique in TECHNIQUES
        if technique not in ("loss, layer, checkpoints", "loss, layer, heads, checkpoints")
        or (model in ONE_PROJECTION) == (technique == "loss, layer, checkpoints")
    ]
    shuffled = random.Random(1)

    def spread(values: Sequence[Any]) -> list[Any]:
        found = [values[number % len(values)] for number in range(len(every))]
        shuffled.shuffle(found)
        return found

    rest = (spread(values) for values in (LENGTHS, (False, True), OPTIMIZERS, PRECISIONS, (1, 3), (1, 2)))
    return [
        Cell(model, tokens, technique, lora, optimizer, precision, batch, accumulation)
        for (model, technique), tokens, lora, optimizer, precision, batch, accumulation in zip(
            every, *rest, strict=True
        )
    ]


def hybrid_cells() -> list[Cell]:
    """Each hybrid model trained whole, with checkpoints, tiled and untiled; and its adapters, without checkpoints.

    Those that are slow on real tensors come last.
    """
    cells = [
        Cell(model, HYBRID_TOKENS.get(model, 3072), technique, lora)
        for technique, lora in (("loss, MLP, checkpoints", False), ("loss, checkpoints", False), ("loss, MLP", True))
        for model in HYBRIDS
    ]
    return sorted(cells, key=lambda cell: cell.model in HYBRID_TOKENS)


def picture_cells() -> list[Cell]:
    """Each model that reads pictures trained whole, with checkpoints; and its adapters, with and without."""
    return [
        Cell(model, 3072, technique, lora, pictures=8)
        for technique, lora in (
            ("loss, MLP, checkpoints", False),
            ("loss, MLP, checkpoints", True),
            ("loss, MLP", True),
        )
        for model in PICTURE_MODELS
    ]


@dataclass(frozen=True)
class Grid:
    """Cells, and where their rows go.

    Attributes:
        name: of the file in benchmarks/results.
        cells: all of them.
    """

    name: str
    cells: list[Cell]

    @property
    def results(self) -> Path:
        return ROOT / "benchmarks" / "results" / f"{self.name}.jsonl"

    def known_rows(self, versions: dict[str, Any]) -> list[dict[str, Any]]:
        """What an earlier run with the same libraries has measured already."""
        lines = self.results.read_text(encoding="utf-8").splitlines() if self.results.is_file() else []
        wanted = set(self.cells)
        return [row for row in map(json.loads, lines) if _cell_of(row) in wanted and row["versions"] == versions]

    def write(self, rows: list[dict[str, Any]]) -> None:
        """Write the rows."""
        self.results.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@contextmanager
def _without_operators() -> Iterator[None]:
    """Profiles begun inside have the allocator's events and ``record_function`` alone.

    A profile of every operator of a Mamba loop over 768 tokens takes 20 GB.
    """
    enable: Any = vars(profiler)["_enable_profiler"]
    vars(profiler)["_enable_profiler"] = partial(enable, scopes={RecordScope.USER_SCOPE})
    try:
        yield
    finally:
        vars(profiler)["_enable_profiler"] = enable


def measure(config: Any, setup: Setup, tokens: int) -> int:
    """Highest total of the CPU allocator's own events within the second step."""
    gc.collect()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _without_operators(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
            built = build(config, setup, "cpu")
            weights = [weight for weight in built.model.parameters() if weight.requires_grad]
            optimizer = make_optimizer(setup.optimizer, weights)
            batch = make_batch(built.model, setup, tokens, torch.device("cpu"))
            prepare_optimizer(optimizer, weights)
            for _ in range(2):
                with record_function("whole step"):
                    for _ in range(setup.accumulation):
                        loss = compute_loss(built.model, setup, batch)
                        loss.backward()
                        del loss
                    update(optimizer, weights)
    found = events.profiler.kineto_results.events()
    begin = max(event.start_ns() for event in found if event.name() == "whole step")
    changes = sorted((event.start_ns(), event.nbytes()) for event in found if event.name() == "[memory]")
    live = peak = 0
    for when, change in changes:
        live += change
        if when >= begin:
            peak = max(peak, live)
    return peak


def run_cell(cell: Cell) -> dict[str, Any]:
    """Both numbers, in bytes, and how far the prediction is off."""
    return compared(cell, measure(cell.config(), cell.setup(), cell.tokens))


def compared(cell: Cell, measured: int) -> dict[str, Any]:
    """The row of a cell: today's plan beside the bytes that were measured."""
    prediction = predict(cell.config(), cell.setup(), cell.tokens, workspace=cpu_workspace, device_type="cpu")
    return {
        **asdict(cell), "predicted_bytes": round(prediction.peak), "measured_bytes": measured,
        "error": prediction.peak / measured - 1, "peak_at": str(prediction.peak_at),
        "fake_lengths": list(prediction.lengths), "fake_layers": [len(one.layers) for one in prediction.depths.samples],
        "layers": prediction.depths.layers,
    }  # fmt: skip


def plan_again(grid: Grid) -> None:
    """Write the rows with today's plan of what was measured."""
    rows = [json.loads(line) for line in grid.results.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if cell := _cell_of(row):
            row |= compared(cell, row["measured_bytes"])
            print(
                f"{row['error']:+.3%}  {row['predicted_bytes']:>12,} {row['measured_bytes']:>12,}  {cell}", flush=True
            )
    grid.write(rows)


def _cell_of(row: dict[str, Any]) -> Cell | None:
    """The cell of a row of results, None of one that is no longer run."""
    try:
        filled: dict[str, Any] = {"pictures": 0} | row
        return Cell(**{field.name: filled[field.name] for field in fields(Cell)})
    except KeyError:
        return None


def main() -> int:
    """Run the cells that have not been; write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cells whose description holds this word; nothing is written")
    parser.add_argument("--hybrid", action="store_true", help="models whose layers carry a state")
    parser.add_argument("--pictures", action="store_true", help="models that read pictures")
    parser.add_argument("--plan", action="store_true", help="measure nothing: only plan again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    grid = Grid("plan-cpu", all_cells())
    for kind, cells in (("hybrid", hybrid_cells), ("pictures", picture_cells)):
        if getattr(options, kind):
            grid = Grid(f"plan-cpu-{kind}", cells())
    if options.plan:
        plan_again(grid)
        return 0
    about = stamp(environment(), ["python", *sys.argv])
    rows = [] if options.only else grid.known_rows(about["versions"])
    known = {_cell_of(row) for row in rows}
    for cell in grid.cells:
        if (options.only and options.only not in str(cell)) or cell in known:
            continue
        row = {**about, **run_cell(cell)}
        rows.append(row)
        print(f"{row['error']:+.3%}  {row['predicted_bytes']:>12,} {row['measured_bytes']:>12,}  {cell}", flush=True)
        if not options.only:
            grid.write(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
