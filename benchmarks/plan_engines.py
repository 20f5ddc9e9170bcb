"""The plan's engine terms against real runs of two processes on the CPU.

Run it from the repository, with nothing else running::

    python benchmarks/plan_engines.py                      # all cells, into benchmarks/results; then docs/tables.py
    python benchmarks/plan_engines.py --only zero3         # some, printed only
    python benchmarks/plan_engines.py --plan               # the plan again, beside what was measured

Measured is what PyTorch's allocator has given out and not had back, by all threads, in the process that needs most,
which the plan is of: from before the model is made, at its highest in an update, the lowest of three updates after a
first one, with the highest beside it. On a CPU device and host are one memory, so that the plan's device bytes and its
part of the host's are added; what no allocator shows (driver context, communicator, fragmentation, the process itself)
is left out of both.

DeepSpeed's bucket is set to vocabulary * hidden elements on both sides, and what ZeRO-3 keeps gathered or gathers ahead
to a part of the model: its defaults are larger than a small model. gloo's threads hold buffers of collectives for some
time, depending on the machine's load, so that every collective is waited for, and a few milliseconds more.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import AutoConfig

from environment import environment, stamp
from seqtile.options import TilingOptions
from seqtile.planner import sharding_terms
from seqtile.planner.accelerators import Device
from seqtile.planner.fake_step import build, compute_loss
from seqtile.planner.live_at_peaks import GRADIENTS
from seqtile.planner.memory_plan import HOST_PROCESS, Planner
from seqtile.planner.names import DEEPSPEED
from seqtile.planner.phases import REST, Phase
from seqtile.planner.request import Request
from seqtile.planner.sharding_terms import CONTEXT, on_device
from seqtile.planner.step_config import Lora
from seqtile.recognise.decoder_layers import decoder_layers

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "plan-engines.jsonl"

RANKS = 2
TOKENS = 1024
CONFIG: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 4096, "max_position_embeddings": 8192, "pad_token_id": 0,
}  # fmt: skip
BUCKET = CONFIG["hidden_size"] * CONFIG["vocab_size"]  # no gradient is larger
LIVE, PREFETCH, PERSISTENT = 1_500_000, 200_000, 1_000  # elements that ZeRO-3 keeps, gathers ahead and never shards
UPDATES, UPDATE = 3, "whole update"  # those that are measured after a first one, and what a trace calls one
COLLECTIVES = (
    "all_gather_into_tensor", "all_gather_single", "all_gather", "reduce_scatter_tensor", "reduce_scatter_single",
    "all_reduce", "reduce", "broadcast",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One run of two processes.

    Attributes:
        engine: of :data:`seqtile.planner.names.ENGINES`.
        lora: adapters instead of every weight.
        accumulation: micro-batches per update.
        offload: the optimizer on the host.
    """

    engine: str
    lora: bool
    accumulation: int
    offload: bool

    def request(self) -> Request:
        """What the plan is asked."""
        return Request(
            "llama", AutoConfig.for_model("llama", **CONFIG), Device("cpu", 2**34, None, "made up"), gpus=RANKS,
            engine=self.engine, lora=Lora(8) if self.lora else None, precision="float32", attention="flash",
            engine_offload=("optimizer",) if self.offload else (), accumulation=self.accumulation, device_type="cpu",
            options=TilingOptions(tile=256, loss="tiled", loss_tile=256, checkpoint="layer"),
        )  # fmt: skip


def all_cells() -> list[Cell]:
    """Those that can be measured: DDP offloads nothing, and FSDP2's offload on a CPU moves nothing."""
    return [
        Cell(engine, lora, accumulation, offload)
        for accumulation in (1, 2)
        for engine in ("zero3", "zero2", "fsdp2", "ddp")
        for lora in (False, True)
        for offload in ((False, True) if engine in DEEPSPEED else (False,))
    ]


def planned(cell: Cell) -> tuple[float, dict[str, float], str]:
    """Bytes of one rank by the plan, its terms, and where the peak is."""
    sharding_terms.ZERO_BUCKET = BUCKET
    sharding_terms.ZERO3_LIVE, sharding_terms.ZERO3_PREFETCH = LIVE, PREFETCH
    planner = Planner(cell.request())
    estimate = planner.estimate(TOKENS)
    host = {f"host: {name}": value / RANKS for name, value in estimate.host_terms.items() if name != HOST_PROCESS}
    terms = {name: value for name, value in estimate.terms.items() if name != CONTEXT} | host
    peak_at = estimate.peak_at
    if cell.engine == "zero2":
        # After the update every rank gathers the weights, of which gloo has a copy of its own (ProcessGroupGloo.cpp,
        # allgather, newLikeFlat); no gradient is left then. NCCL has none.
        gathering = on_device(planner.request, planner.counts, {}, Phase(REST, direction="forward")) | host
        gathering[GRADIENTS] = 0.0
        gathering["gloo's copy"] = 4.0 * planner.counts.trained
        if sum(gathering.values()) > sum(terms.values()):
            terms, peak_at = gathering, "gathering of the updated weights"
    return sum(terms.values()), terms, peak_at


class Run:
    """One rank's model on its engine."""

    def __init__(self, cell: Cell, rank: int) -> None:
        setup = Planner(cell.request()).resolved(TOKENS)
        self.cell, self.setup = cell, setup
        model = build(cell.request().config, setup, "cpu").model
        self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.model: Any
        if cell.engine in DEEPSPEED:
            self.model = self._deepspeed(model)
            return
        if cell.engine == "ddp":
            self.model = torch.nn.parallel.DistributedDataParallel(model)
        else:
            from torch.distributed.fsdp import fully_shard

            for layer in decoder_layers(model):
                fully_shard(model.get_submodule(layer.name))
            self.model = fully_shard(model)
            self.weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-5, fused=True)

    def _deepspeed(self, model: Any) -> Any:
        import deepspeed

        stage = int(self.cell.engine[-1])
        zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": BUCKET}
        if stage == 3:
            zero |= {
                "stage3_max_live_parameters": LIVE, "stage3_max_reuse_distance": LIVE,
                "stage3_prefetch_bucket_size": PREFETCH, "stage3_param_persistence_threshold": PERSISTENT,
            }  # fmt: skip
        if self.cell.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        config = {
            "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": self.cell.accumulation,
            "gradient_clipping": 1.0, "zero_optimization": zero, "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }  # fmt: skip
        optimizer = torch.optim.AdamW(self.weights, lr=1e-5, fused=True)
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)[0]

    def update(self) -> None:
        """One update of all its micro-batches."""
        ids = torch.zeros(1, TOKENS, dtype=torch.long)
        for number in range(self.cell.accumulation):
            last = number == self.cell.accumulation - 1
            context: Any = nullcontext()
            if self.cell.engine == "ddp" and not last:
                context = self.model.no_sync()
            if self.cell.engine == "fsdp2":
                self.model.set_requires_gradient_sync(last)
            with context:
                loss = compute_loss(self.model, self.setup, {"input_ids": ids, "labels": ids})
                if self.cell.engine in DEEPSPEED:
                    self.model.backward(loss)
                    del loss
                    self.model.step()
                    continue
                loss.backward()
                del loss
        if self.cell.engine not in DEEPSPEED:
            torch.nn.utils.clip_grad_norm_(self.weights, 1.0, foreach=True)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)


def wait_for_collectives() -> None:
    """Make every collective wait for its end, and for the threads that hold its buffers."""

    def waiting(collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def call(*args: Any, **kwargs: Any) -> Any:
            work = collective(*args, **kwargs)
            if work is not None:
                work.wait()
            time.sleep(0.005)
            return work

        return call

    for name in COLLECTIVES:
        if hasattr(torch.distributed, name):  # PyTorch before 2.13 has no *_single
            setattr(torch.distributed, name, waiting(getattr(torch.distributed, name)))


def count_every_thread(on: bool = True) -> None:
    """Let the allocator's count of bytes follow every thread.

    By itself it follows the threads under a profiler, and what one of gloo's threads is the last to hold would stay
    counted after it is freed (c10/core/CPUAllocator.cpp, ProfiledCPUMemoryReporter::Delete).
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = on


def measure(cell: Cell) -> list[int]:
    """Highest bytes that this rank's allocator had given out, in each update but the first."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    wait_for_collectives()
    gc.collect()
    count_every_thread()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as events:
        run = Run(cell, torch.distributed.get_rank())
        for _ in range(1 + UPDATES):
            with record_function(UPDATE):
                run.update()
    return highest(events)


def highest(events: profile) -> list[int]:
    """Highest count of allocated bytes in each update but the first."""
    updates, counts = [], []
    assert events.profiler is not None and events.profiler.kineto_results is not None
    rest = events.profiler.kineto_results.experimental_event_tree()
    while rest:
        event = rest.pop()
        rest += event.children
        if event.name == UPDATE:
            updates.append((event.start_time_ns, event.end_time_ns))
        elif hasattr(event.extra_fields, "total_allocated"):
            counts.append((event.start_time_ns, event.extra_fields.total_allocated))
    return [max(count for when, count in counts if begin <= when <= end) for begin, end in sorted(updates)[1:]]


def worker(cell: Cell, result: Path) -> None:
    """What each of the two processes runs."""
    warnings.simplefilter("ignore")
    peaks = torch.tensor(measure(cell))
    torch.distributed.all_reduce(peaks, torch.distributed.ReduceOp.MAX)
    if torch.distributed.get_rank() == 0:
        result.write_text(json.dumps(peaks.tolist()), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def run_once(cell: Cell, seconds: float = 300.0) -> list[int] | str:
    """Measured bytes of each update, or why there are none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "peak.json"
        words = [sys.executable, __file__, "--worker", json.dumps(asdict(cell)), str(result)]
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(RANKS)}
        ranks = [
            subprocess.Popen(
                words, env={**os.environ, **address, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        try:
            said = [rank.communicate(timeout=seconds)[1] for rank in ranks]
        except subprocess.TimeoutExpired:
            said = ["no answer in time"]
        finally:
            for rank in ranks:
                rank.kill()
        if not result.is_file():
            return said[0].strip().splitlines()[-1][:300] if said[0].strip() else "unknown"
        found: list[int] = json.loads(result.read_text(encoding="utf-8"))
        return found


def run_cell(cell: Cell) -> dict[str, Any]:
    """Both numbers, in bytes, or why there is none."""
    found = run_once(cell)
    return {**asdict(cell), **({"failed": found} if isinstance(found, str) else compared(cell, found))}


def compared(cell: Cell, updates: list[int]) -> dict[str, Any]:
    """The plan beside the lowest of the measured updates."""
    predicted, terms, peak_at = planned(cell)
    return {
        "predicted_bytes": round(predicted), "measured_bytes": min(updates), "updates": updates,
        "error": predicted / min(updates) - 1, "peak_at": peak_at,
        "terms": {name: round(one) for name, one in terms.items()},
    }  # fmt: skip


def plan_again() -> None:
    """Write the results with today's plan of what was measured."""
    rows = [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if "updates" in row:
            row |= compared(Cell(row["engine"], row["lora"], row["accumulation"], row["offload"]), row["updates"])
    RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main() -> int:
    """Run the cells; write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="cells whose description holds this word; nothing is written")
    parser.add_argument("--plan", action="store_true", help="measure nothing: only plan again")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        worker(Cell(**json.loads(given.worker[0])), Path(given.worker[1]))
        return 0
    if given.plan:
        plan_again()
        return 0
    about = stamp(environment(), ["python", *sys.argv])
    rows = []
    for cell in all_cells():
        if given.only and given.only not in str(cell):
            continue
        row = {**about, **run_cell(cell)}
        rows.append(row)
        shown = row.get("failed") or f"{row['error']:+.2%} {row['predicted_bytes']:>12,} {row['measured_bytes']:>12,}"
        print(f"{shown}  {cell}  {row.get('peak_at')} {row.get('terms')}", flush=True)
        if not given.only:
            RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
