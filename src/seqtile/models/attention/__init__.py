"""Head-wise attention on one instance."""
