"""Small tokenizers, trained here, in the directories that a model has."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CHATML = (
    "{% for tool in tools or [] %}{{ 'tool ' + (tool | tojson) + '\n' }}{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEXTS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox runs away!",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # 3",
    "Grüße aus Köln, 東京 and मुंबई 🎉🎉 👩‍👩‍👧‍👦 naïve café",
    "one two three four five six seven eight nine ten",
]
_SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]


def byte_level(folder: Path, *, chat_template: str | None = CHATML) -> Path:
    """A byte-level BPE tokenizer such as that of Llama 3 or Qwen 3, of 400 tokens. Returns the folder."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    settings = {"bos_token": "<|end|>", "eos_token": "<|im_end|>"}
    if chat_template is not None:
        settings["chat_template"] = chat_template
    return _save(tokenizer, folder, settings)


def byte_fallback(folder: Path) -> Path:
    """A BPE tokenizer with byte fallback such as that of Llama 2: unknown characters become tokens like <0xE2>."""
    special = ["<unk>", "<s>", "</s>"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special + byte_tokens, limit_alphabet=60, show_progress=False
    )
    trained.train_from_iterator(_TEXTS, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=model["vocab"], merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.add_special_tokens(special)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _save(tokenizer, folder, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def metaspace(folder: Path) -> Path:
    """A BPE tokenizer whose decoder is Metaspace alone."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(_TEXTS, trainer)
    return _save(tokenizer, folder, {"eos_token": "</s>", "unk_token": "<unk>"})


def words(folder: Path) -> Path:
    """Whole words without a decoder: tokens are joined by spaces."""
    vocab = {word: token_id for token_id, word in enumerate(["a", "b", "c", "dog", "cat", "runs", "sleeps"])}
    return _save(Tokenizer(models.WordLevel(vocab, unk_token="a")), folder, {})


def _save(tokenizer: Tokenizer, folder: Path, settings: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
