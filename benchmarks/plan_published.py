"""Published runs, each predicted by one ``seqtile plan`` command; no GPU is needed.

Run it from the repository::

    python benchmarks/plan_published.py                    # all rows, into benchmarks/results; then docs/tables.py
    python benchmarks/plan_published.py --only litgpt      # some, printed only

No constant is fitted to any row. A row that led to a term of the plan is no judge of that term, and says so; a row
whose settings no flag can tell stands in a table of its own, with what is missing.

ALST's rows have the settings of the files that made them (snowflakedb/ArcticTraining, commit b28638e,
``projects/sequence-parallelism/run-*.yml``): Liger's kernels in all but the base, FlashAttention 2 on the H100 and 3 on
the H200, and the MLP alone in tiles.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from environment import environment, stamp
from seqtile.cli import main as seqtile
from seqtile.planner import explain
from seqtile.planner.sharding_terms import CONTEXT

RESULTS = Path(__file__).parent / "results" / "plan-published.jsonl"


@dataclass(frozen=True)
class Run:
    """One published run.

    Attributes:
        name: who published it, and which run it is.
        asked: the words after ``seqtile plan --model``.
        value: GiB, or tokens where ``unit`` is ``"tokens"``.
        unit: ``"device"``, what the device reported in use; ``"allocated"``, what PyTorch's allocator did, without
            context and cache; or ``"tokens"``, the longest sequence that ran.
        led_to: a term of the plan that was found in this row; "" in a row that judges all of them.
        lacks: what no flag of the command can tell; "" where it can be told everything.
    """

    name: str
    asked: str
    value: float
    unit: str
    led_to: str = ""
    lacks: str = ""


_GIST = "llama-7b --device a100-80 --gpus 8 --engine zero3 --loss full --tile none --max-length 4096"
_ALST = "llama-8b --engine zero3 --dtype mixed --checkpoint layer"
_ALST_1 = f"{_ALST} --gpus 1"
_ALST_8 = f"{_ALST} --device h100 --gpus 8 --offload"
_ALST_MLP = "--blocks mlp"  # what ALST runs in tiles
_LOGITS = "what whole logits leave over in the allocator"
_KERNEL = "its end: at 555,000 tokens a kernel's illegal memory access, not a lack of memory"
_REPEATED = "attention by PyTorch's kernel with keys and values repeated for every head, as transformers did then"
_DEEPSPEED = "its configuration of DeepSpeed (buckets, gathered elements); planned with the defaults"
_KBIT = "norms, embeddings and head in fp32, as PEFT prepared 4-bit models at the time"
_STATES = "the optimizer and its precision, which were not found; planned with AdamW in bf16"
_LITGPT = (
    "llama-7b --device a100-40 --dtype bfloat16 --tile none --loss full --checkpoint none --max-length 1304 --lora "
    "r=8,dropout=0.05,target_modules=q_proj+v_proj"
)
_MST = "llama-8b --device a100-80 --dtype bfloat16"
_HF = "llama-8b --qlora --lora r=32 --tile none --loss full --checkpoint layer"

RUNS = (
    Run("gist d4cd6a20, no checkpoints, batch 2", f"{_GIST} --checkpoint none --batch-size 2", 70.5, "device",
        lacks=_DEEPSPEED),
    Run("gist d4cd6a20, batch 2", f"{_GIST} --checkpoint layer --batch-size 2", 19.0, "device", lacks=_DEEPSPEED),
    Run("gist d4cd6a20, batch 2, optimizer on the host",
        f"{_GIST} --checkpoint layer --batch-size 2 --offload optimizer", 8.8, "device", lacks=_DEEPSPEED),
    Run("gist d4cd6a20, batch 8", f"{_GIST} --checkpoint layer --batch-size 8", 36.4, "device", lacks=_DEEPSPEED),
    Run("gist d4cd6a20, batch 4, all on the host",
        f"{_GIST} --checkpoint layer --batch-size 4 --offload optimizer,weights", 7.4, "device", lacks=_DEEPSPEED),
    Run("gist d4cd6a20, batch 8, accumulation 2",
        f"{_GIST} --checkpoint layer --batch-size 8 --gradient-accumulation 2", 59.5, "device", lacks=_DEEPSPEED),
    Run("ALST, H100, no Liger", f"{_ALST_1} --device h100 --attention flash --offload optimizer,weights --loss full "
        "--tile none --max-length 32000", 71.9, "device", _LOGITS),
    Run("ALST, H200, no Liger", f"{_ALST_1} --device h200 --attention flash3 --offload optimizer,weights --loss full "
        "--tile none --max-length 65000", 137.36, "device", _LOGITS),
    Run("ALST, H200, Liger", f"{_ALST_1} --device h200 --attention flash3 --offload optimizer,weights --liger "
        "--tile none --max-length 300000", 134.96, "device"),
    Run("ALST, H200, Liger, checkpoints on the host", f"{_ALST_1} --device h200 --attention flash3 --liger "
        "--tile none --offload checkpoints,optimizer,weights --max-length 650000", 126.81, "device"),
    Run("ALST, H200, Liger, tiled MLP, checkpoints on the host", f"{_ALST_1} --device h200 --attention flash3 --liger "
        f"{_ALST_MLP} --offload checkpoints,optimizer,weights --max-length 1200000", 136.15, "device"),
    Run("LitGPT, batch 1", _LITGPT, 19.84, "allocated"),
    Run("LitGPT, batch 2", f"{_LITGPT} --batch-size 2", 27.07, "allocated"),
    Run("LitGPT, 4 bits", f"{_LITGPT} --qlora", 12.89, "allocated",
        lacks="bitsandbytes 0.41, which kept the input of every product in 4 bits"),
    Run("ALST, 1 x H100", f"{_ALST_1} --device h100 --liger {_ALST_MLP} --offload checkpoints,optimizer,weights",
        500_000, "tokens", lacks=_KERNEL),
    Run("ALST, 8 x H100", f"{_ALST_8} checkpoints,optimizer --liger {_ALST_MLP} --sp-size 8 --host-memory 1.9TiB",
        3_700_000, "tokens"),
    Run("ALST, ablation, base", f"{_ALST_8} optimizer --loss full --tile none", 32_000, "tokens"),
    Run("ALST, ablation, tiled loss", f"{_ALST_8} optimizer --liger --tile none", 160_000, "tokens"),
    Run("ALST, ablation, Ulysses", f"{_ALST_8} optimizer --liger --tile none --sp-size 8", 1_100_000, "tokens"),
    Run("ALST, ablation, tiled MLP", f"{_ALST_8} optimizer --liger {_ALST_MLP} --attention sdpa --sp-size 8",
        1_200_000, "tokens", lacks=_REPEATED),
    Run("ALST, ablation, checkpoints on the host", f"{_ALST_8} checkpoints,optimizer --liger --tile none --sp-size 8 "
        "--host-memory 1.9TiB", 2_400_000, "tokens"),
    Run("MsT, checkpoints", f"{_MST} --checkpoint layer --loss full --tile none", 14_000, "tokens", lacks=_STATES),
    Run("MsT", f"{_MST} --checkpoint layer", 60_000, "tokens", lacks=f"{_STATES}; the tiles are the paper's own"),
    Run("Unsloth's table, HF and FA2, 24 GB", f"{_HF} --device rtx4090", 5_789, "tokens", lacks=_KBIT),
    Run("Unsloth's table, HF and FA2, 80 GB", f"{_HF} --device h100", 28_454, "tokens", lacks=_KBIT),
)  # fmt: skip


NOT_ASKED = (("torchtitan, Llama 8B, 32K, 83.9 GiB", "float8 products and torch.compile"),)
"""Runs that no command comes near, and what is missing."""


@contextlib.contextmanager
def _no_proposals() -> Iterator[None]:
    """What else would buy length is not looked for inside."""
    search = explain.next_step
    explain.next_step = lambda *_: None
    try:
        yield
    finally:
        explain.next_step = search


def ask(run: Run) -> dict[str, Any]:
    """The command's own answer, as ``--json`` prints it."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), warnings.catch_warnings(), _no_proposals():
        warnings.simplefilter("ignore")
        seqtile(["plan", "--json", "--model", *shlex.split(run.asked)])
    found: dict[str, Any] = json.loads(said.getvalue().strip().splitlines()[-1])
    return found


def judge(run: Run) -> dict[str, Any]:
    """The expected number, the sure one, and how far each is off."""
    found = ask(run)
    if run.unit == "tokens":
        expected = found["max_length_beyond_positions"] or found["max_length"]
        sure = found["sure_length_beyond_positions"] or found["sure_length"]
    else:
        peak = found["peak_device_gib"]
        expected, sure = peak["expected"], peak["high"]
        if run.unit == "allocated":
            expected -= found["terms"]["device_gib"][CONTEXT]
            sure = 1.01 * expected
    return {
        "run": run.name, "asked": run.asked, "unit": run.unit, "published": run.value, "expected": expected,
        "sure": sure, "error": expected / run.value - 1, "sure_error": sure / run.value - 1, "led_to": run.led_to,
        "lacks": run.lacks,
        "peak_at": found["peak_at"], "terms": found["terms"]["device_gib"], "limited_by": found["limited_by"],
    }  # fmt: skip


def _line(row: dict[str, Any], last: str) -> str:
    tokens = row["unit"] == "tokens"

    def shown(value: float) -> str:
        return f"{value:,.0f} tokens" if tokens else f"{value:.1f} GiB"

    return (
        f"| {row['run']} | {shown(row['published'])} | {shown(row['expected'])} | {row['error']:+.1%} "
        f"| {shown(row['sure'])} | {row['sure_error']:+.1%} | {last} |"
    )


def main() -> int:
    """Ask for every row, print it with its command, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="rows whose name holds this word; nothing is written")
    given = parser.parse_args()
    about = stamp(environment(), ["python", *sys.argv])
    rows = []
    for run in RUNS:
        if given.only and given.only.lower() not in run.name.lower():
            continue
        row = {**about, **judge(run)}
        rows.append(row)
        print(f"{_line(row, row['lacks'] or row['led_to'] or '')}\n  seqtile plan --model {row['asked']}", flush=True)
    if not given.only:
        RESULTS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
