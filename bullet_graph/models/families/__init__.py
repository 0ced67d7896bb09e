"""The model families: how each reads its config, and its presets."""
