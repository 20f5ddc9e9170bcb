"""Ulysses: every rank holds a part of each row, and in attention some of the heads for the whole row.

Through accelerate's ``ParallelismConfig(sp_backend="deepspeed")`` over ZeRO-3. Over ZeRO-2 its gradients are too large.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from grid import zero12
from grid.cases import HEADS, RECOMPUTED, SAVED, SDPA, WORLD, Case, Trained, named, train_alone
from grid.sequence import LENGTH, PADDED, Rows, Shared, usual_rows
from grid.zero3 import STINGY

EIGHT_HEADS = {**SDPA, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4}
CASES = [
    *usual_rows(STINGY),
    Rows("heads", HEADS, config=EIGHT_HEADS, options=STINGY, steps=2, more={"heads": 1}, filled=PADDED),
    Rows("heads-saved", HEADS, config=EIGHT_HEADS, options=STINGY, steps=2, **RECOMPUTED, more=SAVED),
    Rows(
        "tiled-loss-50", "tiled loss", config=EIGHT_HEADS, options=STINGY,
        steps=50, clip=0.3, tiled_loss=True, **RECOMPUTED, learnable=True, more={**SAVED, "offload": True},
    ),
    Rows(
        "zero2", "over ZeRO-2", config=SDPA, options={"stage": 2},
        upstream="wrong upstream: gradients `sp_size` times too large, without tiles too",
    ),
]  # fmt: skip


class Ulysses(Shared):
    @classmethod
    def arguments(cls, case: Case) -> dict[str, Any]:
        from accelerate import ParallelismConfig
        from accelerate.utils import DeepSpeedSequenceParallelConfig

        handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
        return {
            "parallelism_config": ParallelismConfig(
                sp_backend="deepspeed", sp_size=WORLD, dp_shard_size=1, sp_handler=handler
            ),
            "deepspeed": {
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
                "gradient_clipping": "auto",
                "zero_allow_untested_optimizer": True,
                "zero_force_ds_cpu_optimizer": False,
                "zero_optimization": dict(case.options),
            },
        }

    @classmethod
    def check(cls, trainer: Any) -> None:
        from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
        from deepspeed.utils import groups

        engine, accelerator = trainer.model_wrapped, trainer.accelerator
        assert accelerator.distributed_type == "DEEPSPEED" and accelerator.num_processes == WORLD
        assert groups._get_sequence_parallel_world_size() == WORLD
        stage = accelerator.deepspeed_config["zero_optimization"]["stage"]
        assert engine.zero_optimization_stage() == stage
        if stage == 3:
            assert all(p.ds_status is ZeroParamStatus.NOT_AVAILABLE for p in trainer.model.parameters())

    @classmethod
    @contextmanager
    def watching(cls, trainer: Any, seen: Trained) -> Iterator[None]:
        """accelerate steps DeepSpeed's engine within its backward."""
        from deepspeed.utils import safe_get_full_grad

        engine = trainer.model_wrapped

        def step(*args: Any, **kwargs: Any) -> None:
            seen.gradients.append({name: safe_get_full_grad(p).clone() for name, p in named(trainer.model).items()})
            type(engine).step(engine, *args, **kwargs)

        def forward(module: Any, args: Any, kwargs: Any) -> None:
            assert kwargs["input_ids"].shape == (2, LENGTH // WORLD)

        hook = trainer.model.register_forward_pre_hook(forward, with_kwargs=True)
        engine.step = step
        try:
            yield
        finally:
            hook.remove()
            del engine.step

    @classmethod
    def whole_weights(cls, trainer: Any) -> dict[str, Tensor]:
        from deepspeed.utils import safe_get_full_fp32_param

        weights = {name: safe_get_full_fp32_param(p).clone() for name, p in named(trainer.model).items()}
        trainer.model_wrapped.destroy()
        return weights

    @classmethod
    def done(cls) -> None:
        """DeepSpeed has put itself in the place of Transformers' attention, and takes one group per process."""
        from deepspeed.runtime.sequence_parallel import parallel_state_sp
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        unset_hf_deepspeed_config()
        ALL_ATTENTION_FUNCTIONS["sdpa"] = sdpa_attention_forward
        parallel_state_sp._SEQUENCE_PARALLEL_GROUP = None
        parallel_state_sp._SEQUENCE_DATA_PARALLEL_GROUP = None

    @classmethod
    def run(cls, case: Case, rank: int) -> None:
        if not case.upstream:
            return super().run(case, rank)
        got, true = cls.train(case, rank, tiled=False).gradients[0], train_alone(case).gradients[0]
        for name, gradient in true.items():
            torch.testing.assert_close(
                got[name], WORLD * gradient, rtol=1e-4, atol=1e-5,
                msg=lambda text, name=name: f"{name} is no longer {WORLD} times too large under Ulysses over ZeRO-2 "
                f"without seqtile. If it is right now, upstream is fixed: make this case an ordinary one, and have "
                f"`seqtile train --engine zero2` take --sp-size. {text}",
            )  # fmt: skip


start = zero12.start
ENGINE = Ulysses
