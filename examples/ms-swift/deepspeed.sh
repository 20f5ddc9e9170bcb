#!/bin/bash
# Weights in shards by DeepSpeed (ZeRO-3); zero2 leaves the weights whole.
set -e
MODEL=${MODEL:-Qwen/Qwen3-8B}
DATASET=${DATASET:-data.jsonl}
export NPROC_PER_NODE=${NPROC_PER_NODE:-8}

swift sft \
    --external_plugins "$(python -m seqtile.integrations.ms_swift)" \
    --use_tiled_mlp true \
    --tiled_mlp_num_shards 4 \
    --deepspeed zero3 \
    --model "$MODEL" \
    --dataset "$DATASET" \
    --tuner_type full \
    --torch_dtype bfloat16 \
    --attn_impl sdpa \
    --max_length 65536 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 1 \
    --gradient_checkpointing true \
    --gradient_checkpointing_kwargs '{"use_reentrant": false}' \
    --output_dir output "$@"
