"""Checkpoints on disk: whole or not there, one file or a folder of shards. Knows nothing of Lightning."""
