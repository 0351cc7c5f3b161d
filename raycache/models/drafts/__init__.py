"""Models that draft tokens for another: a small model, prediction layers, EAGLE heads."""
