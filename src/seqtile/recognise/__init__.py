"""What a block computes: candidates, traces and the formulas that are proven from them."""
