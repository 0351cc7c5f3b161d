"""Vocabularies: text to token ids, and each token's bytes, for every form of tokenizer that checkpoints carry."""
