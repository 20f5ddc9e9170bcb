"""The tiled language-model loss: recogniser and installer."""
