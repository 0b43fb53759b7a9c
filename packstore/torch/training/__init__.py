"""The parts of a training run; the entry point is :func:`packstore.torch.training.train.train`.

``setup.py`` assembles a :class:`Run`, ``loop.py`` runs it. ``optimizer.py``: AdamW and schedule.
``reference.py``: sources of reference log-probs. ``evaluate.py``: metrics over a whole dataset.
``checkpoint.py``, ``random_state.py``, ``resume.py``: exact resuming. ``sinks.py``: outputs of
metrics. ``export.py``: the final model and its card. The settings are in
``packstore.config.training``.
"""
