"""Names, types and shapes of tensors as vendors publish them, and their config.json, at small sizes.

One module per family, with `CONFIG`, a config.json with all keys that are published, and `tensors(config)`, which gives
name -> (type, shape) of every tensor, types as safetensors calls them.
"""
