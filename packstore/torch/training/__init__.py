"""A training run, room by room; :func:`packstore.torch.train.train` is its door.

``setup.py`` assembles a :class:`Run`, ``loop.py`` drives it. ``optimizer.py``: AdamW and its
schedule. ``reference.py``: where reference log-probs come from. ``evaluation.py``: metrics over a
whole dataset. ``checkpoint.py``, ``random_state.py``: what a run needs to go on exactly, and
``resume.py``: from where. ``sinks.py``: where metrics go. ``export.py``: the model at the end, with
its card. The settings are in ``packstore.train_config``.
"""
