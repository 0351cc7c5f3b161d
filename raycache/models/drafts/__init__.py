"""Draft models, as selected by `--draft`."""
