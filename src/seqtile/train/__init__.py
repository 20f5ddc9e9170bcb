"""From a recipe to a trained model: a thin layer over TRL's ``SFTTrainer``.

``recipe`` (what is to be done) -> ``data`` and ``load`` (what it is done to) -> ``run`` (doing it) ->
``compare_untiled`` and ``result_report`` (what it cost). ``demo`` is the recipe that runs when nothing is said;
``launch`` starts several processes by torch's agent. What TRL and accelerate leave open is added here: checkpoints
that are known to be whole, a resume that is the same run, and going on after an out-of-memory.
"""
