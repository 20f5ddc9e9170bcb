"""From a recipe to a trained model: a thin layer over TRL's ``SFTTrainer``.

``recipe`` (what is to be done) -> ``data`` and ``load`` (what it is done to) -> ``run`` (doing it) -> ``measure`` and
``report`` (what it cost). ``demo`` is the recipe that runs when nothing is said.
"""
