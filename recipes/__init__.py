"""Recipes: ordinary Lightning modules and data modules, and two commands that train and evaluate them.

The modules and data modules know nothing of pipelines: they are written as for one device, and the strategy in
``configs/strategy/`` decides how they run.

- ``python -m recipes.train recipe=gpt2 strategy.num_stages=2 trainer.devices=2``
- ``python -m recipes.evaluate ckpt_path=path/to/best.ckpt``
"""
