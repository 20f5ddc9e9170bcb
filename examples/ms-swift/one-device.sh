#!/bin/bash
# One device. Install first, from a clone: pip install ms-swift .
set -e
MODEL=${MODEL:-Qwen/Qwen3-8B}
DATASET=${DATASET:-data.jsonl}

swift sft \
    --external_plugins "$(python -m seqtile.integrations.ms_swift)" \
    --use_tiled_mlp true \
    --tiled_mlp_num_shards 4 \
    --model "$MODEL" \
    --dataset "$DATASET" \
    --tuner_type lora \
    --target_modules all-linear \
    --torch_dtype bfloat16 \
    --attn_impl sdpa \
    --max_length 65536 \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --gradient_checkpointing true \
    --gradient_checkpointing_kwargs '{"use_reentrant": false}' \
    --output_dir output "$@"
