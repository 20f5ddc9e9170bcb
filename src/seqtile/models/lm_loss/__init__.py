"""The tiled loss on one model: its own head, and what TRL puts in the head's place."""
