#!/bin/bash
# Weights in shards by PyTorch (FSDP2); for FSDP1 write 1 for fsdp_version in fsdp2.json.
set -e
MODEL=${MODEL:-Qwen/Qwen3-8B}
DATASET=${DATASET:-data.jsonl}
export NPROC_PER_NODE=${NPROC_PER_NODE:-8}

swift sft \
    --external_plugins "$(python -m seqtile.integrations.ms_swift)" \
    --use_tiled_mlp true \
    --tiled_mlp_num_shards 4 \
    --fsdp "$(dirname "$0")/fsdp2.json" \
    --model "$MODEL" \
    --dataset "$DATASET" \
    --tuner_type full \
    --torch_dtype bfloat16 \
    --attn_impl sdpa \
    --max_length 65536 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 1 \
    --gradient_checkpointing false \
    --output_dir output "$@"
