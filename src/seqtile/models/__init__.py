"""What a Transformers model and its config say: positions, rotary scaling, towers, experts, depth."""
