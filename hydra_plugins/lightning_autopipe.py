"""Hydra imports every module of ``hydra_plugins`` when an application starts: the place to register a config group."""

from lightning_autopipe.config import register_configs

register_configs()
