"""Count the Python calls between a tiled decoder layer and its first matrix product.

    python benchmarks/walk.py                                   # the installed seqtile
    python benchmarks/walk.py --source src --source old/src     # two checkouts, one process each, and their ratio

One Llama layer, 256 tokens, ``tile=64``, on the CPU. Counted by ``sys.setprofile`` from the call of the layer to the
first ``mm``, ``addmm`` or ``linear`` that seqtile's own code calls: calls of functions in seqtile's files (PyTorch's
and transformers' own are left out; every resumption of a generator is a call, as the interpreter sees it), those files,
and how often one call is in another file than the one before. ``fused`` is the tiled MLP with its norm, ``head-wise``
attention one key-value head at a time. The first step proves and remembers; the second counts as every later one does.
``us`` is the least processor time of a layer's forward in one thread, without a profile, in 10 rounds of 100.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

WAYS: dict[str, dict[str, Any]] = {"fused": {"tile": 64}, "head-wise": {"tile": 64, "heads": 1, "blocks": "mlp"}}
PRODUCTS = ("mm", "addmm", "linear")


class Walk:
    """Calls of seqtile's functions until the first matrix product."""

    def __init__(self, package: str) -> None:
        self.package, self.calls, self.done = package, list[tuple[str, str]](), False

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        file = frame.f_code.co_filename
        if self.done or not file.startswith(self.package):
            return
        if event == "call":
            self.calls.append((file[len(self.package) + 1 :], frame.f_code.co_name))
        elif event == "c_call" and getattr(argument, "__name__", "") in PRODUCTS:
            self.done = True

    def numbers(self) -> dict[str, Any]:
        files = [file for file, _ in self.calls]
        switches = sum(one != other for one, other in zip(files, files[1:], strict=False))
        return {"calls": len(files), "files": len(set(files)), "switches": switches}


def count(way: str, *, show: bool = False, rounds: int = 10) -> dict[str, Any]:
    """The numbers of one way, of the seqtile that this process imports."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import seqtile

    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(
        hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=4, vocab_size=64
    )
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, use_cache=False)).train()
    seqtile.apply(model, **WAYS[way])
    layer, package = model.model.layers[0], str(Path(seqtile.__file__).parent)
    found: dict[str, Any] = {}
    words: dict[str, Any] = {}
    layer.register_forward_pre_hook(lambda _, args, given: words.update(args=args, given=given), with_kwargs=True)
    model.generation_config.use_cache = False
    ids = torch.randint(64, (1, 256))
    model(input_ids=ids, labels=ids).loss.backward()
    args, given = words["args"], words["given"]
    layer._forward_pre_hooks.clear()
    layer._forward_pre_hooks_with_kwargs.clear()
    seqtile.undo(model)
    seqtile.apply(model, **WAYS[way])
    for step in ("first", "second"):
        x = args[0].detach().requires_grad_()
        walk = Walk(package)
        gc.disable()  # what it frees calls functions of seqtile that are not on the way
        sys.setprofile(walk)
        try:
            output = layer(x, *args[1:], **given)
        finally:
            sys.setprofile(None)
            gc.enable()
        assert walk.done, "no matrix product was called by seqtile"
        (output[0] if isinstance(output, tuple) else output).sum().backward()
        found[step] = walk.numbers()
    if show:
        for (file, function), times in Counter(walk.calls).most_common():
            print(f"{times:5} {file}:{function}", file=sys.stderr)
    best = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        for _ in range(100):
            layer(x, *args[1:], **given)
        best = min(best, (time.process_time() - begin) / 100)
    return {"way": way, **found["second"], "first": found["first"], "us": round(best * 1e6) if rounds else None}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--source", action="append", default=[], help="a folder that holds the package seqtile")
    parser.add_argument("--way", choices=WAYS, help="only this one")
    parser.add_argument("--show", action="store_true", help="which functions, to standard error")
    options = parser.parse_args()
    if options.way and not options.source:
        print(json.dumps(count(options.way, show=options.show)))
        return
    ways = [options.way] if options.way else list(WAYS)
    found = {}
    for source in options.source or [""]:
        folder = str(Path(source).resolve()) if source else ""
        path = os.pathsep.join(part for part in (folder, os.environ.get("PYTHONPATH", "")) if part)
        for way in ways:
            command = [sys.executable, __file__, "--way", way, *(["--show"] if options.show else [])]
            # In one thread: on so few numbers several wait for each other, which is processor time too.
            environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
            found[source, way] = {"source": source or "installed", **json.loads(done.stdout.splitlines()[-1])}
    import torch
    import transformers

    versions = f"Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{datetime.date.today()}, {platform.machine()} CPU, {versions}\n")
    print("| walk | source | calls | files | switches | calls, first step | µs |\n|---|---|---|---|---|---|---|")
    for way in ways:
        for (_, other), row in found.items():
            if other == way:
                numbers = [row["calls"], row["files"], row["switches"], row["first"]["calls"], row["us"]]
                print(f"| {way} | {row['source']} | {' | '.join(f'{number:,}' for number in numbers)} |")


if __name__ == "__main__":
    main()
