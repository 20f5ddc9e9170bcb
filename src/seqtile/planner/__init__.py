"""Plan, measure and explain the memory of a training step.

In the order of their calls:

1. A :class:`~.request.Request` is the question: model, devices, engine, options. ``Request.setup()`` gives the
   :class:`~.step_config.Setup`, one step on one rank.
2. ``layer_structure.find_depths`` chooses a few layers of each kind, and ``fake_step.fake_step`` runs steps of them on
   fake tensors at a few short lengths. ``live_at_peaks`` files what is live at each phase's peak by purpose. ``scans``,
   ``pictures``, ``grpo`` and ``trainer_kinds`` change the step of models and trainers that need it (``kinds``).
3. ``extrapolate.fit_lines`` turns these runs into the bytes at any length and depth.
4. ``memory_plan.Planner`` adds what an engine shards, gathers and moves (``sharding_terms``), workspace, and the
   allocator's bounds, and returns an :class:`~.estimate.Estimate`; ``Planner.longest`` searches the lengths.
   ``step_time`` and ``traffic`` give the time.
5. ``chooser.choose_settings`` compares the estimates of settings, and ``explain`` says what was chosen, what would come
   next, and writes the recipe.
"""
