"""A small tiktoken.model with the files that Kimi publishes beside it, and a slow encoder of it.

The encoder shares no code with raycache or tiktoken: the module `regex`, and merges one by one.
"""

from __future__ import annotations

import base64
import itertools
import json
from pathlib import Path

import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

_HAN = r"\p{Han}"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_PATTERN = regex.compile(
    # As published; `regex` has the same operators for sets in its version 1.
    rf"[{_HAN}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[[{_UPPER}]&&[^{_HAN}]]*[[{_LOWER}]&&[^{_HAN}]]+{_CONTRACTION}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[[{_UPPER}]&&[^{_HAN}]]+[[{_LOWER}]&&[^{_HAN}]]*{_CONTRACTION}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    flags=regex.VERSION1,
)
TEXTS = [
    "The quick brown fox jumps over the lazy dog. It's the dog's day; they'LL run, I'm sure!",
    "def add(a, b):\n    return a + b\n\n\nclass HTTPServer:\n\tpass  # 12345",
    "今天天气很好，我们去公园散步吧。中文English混合，東京タワー、한국어",  # noqa: RUF001
    "Grüße aus Köln 🎉🎉 👩‍👩‍👧‍👦 naïve café ÄÖÜ привет мир",
    "the the the they there then   and  and    and hand sand",
]
SPECIAL = {0: "[BOS]", 1: "[EOS]", 2: "<|im_end|>", 3: "<|im_user|>", 4: "<|im_assistant|>", 5: "<|im_middle|>"}
PLAIN = {6: "<think>", 7: "</think>"}
"""Added tokens that are text, by their place after the ranks, as `SPECIAL` are those that are marks."""
CHAT_TEMPLATE = (
    "{%- for message in messages -%}<|im_{{ message.role }}|>{{ message.role }}<|im_middle|>{{ message.content }}"
    "<|im_end|>{%- endfor -%}{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}"
)


def write(folder: Path, *, size: int = 600) -> dict[bytes, int]:
    """Train and write tiktoken.model, tokenizer_config.json and chat_template.jinja; returns the ranks."""
    ranks = _train(size)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [base64.b64encode(piece) + b" %d\n" % rank for piece, rank in ranks.items()]
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    added = {
        str(len(ranks) + place): {"content": text, "special": place in SPECIAL, "lstrip": False, "rstrip": False}
        for place, text in (SPECIAL | PLAIN).items()
    }
    settings = {
        "tokenizer_class": "TikTokenTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "added_tokens_decoder": added,
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    return ranks


def encode(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Token ids of a text without added tokens."""
    ids = []
    for word in _PATTERN.findall(text):
        pieces = [bytes([byte]) for byte in word.encode()]
        while len(pieces) > 1:
            pairs = [ranks.get(left + right, len(ranks)) for left, right in itertools.pairwise(pieces)]
            best = min(range(len(pairs)), key=pairs.__getitem__)
            if pairs[best] == len(ranks):
                break
            pieces[best : best + 2] = [pieces[best] + pieces[best + 1]]
        # A token that no merges lead to is found as a whole.
        ids += [ranks[word.encode()]] if word.encode() in ranks else [ranks[piece] for piece in pieces]
    return ids


def _train(size: int) -> dict[bytes, int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    )
    byte_of = {chr(byte): byte for byte in [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]}
    hidden = [byte for byte in range(256) if byte not in byte_of.values()]
    byte_of |= {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
    ids = {bytes(byte_of[char] for char in token): i for token, i in trained.get_vocab().items()}
    return dict(sorted(ids.items(), key=lambda item: item[1]))
