"""The trained hybrid models of demos/hybrids/: they repeat a document from a cue, as its last mark wants it."""

from __future__ import annotations

import random
import string
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

DEMOS = Path(__file__).parents[2] / "demos" / "hybrids"
NAMES = ("kda_mla", "mamba2_gqa")
MARKS = {"^": str.upper, "_": str.lower, "=": str}


def question(*, doc_len: int, mark: str, cue: int, seed: int) -> tuple[str, str]:
    """A prompt over a random document with two marks, and the rest of the document as the answer.

    Args:
        doc_len: characters of the document.
        mark: the mark at a third of it; another one stands before it and has no effect.
        cue: where the four characters of the cue begin, counted from the end.
        seed: of the document.
    """
    draw = random.Random(seed)
    plain = sorted(set(string.printable[:95]) - set(MARKS) - {">"})
    doc = draw.choices([*plain, "\n"], weights=[*[1] * len(plain), 5], k=doc_len - 1)
    doc[doc_len // 6], doc[doc_len // 3] = draw.choice("^_="), mark
    text = "".join(doc) + "\n"
    at = doc_len - cue
    return f"{text}>{text[at : at + 4]}", MARKS[mark](text[at + 4 :])


class Demo:
    """A checkpoint as transformers runs it, in float32."""

    def __init__(self, name: str) -> None:
        self.tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(DEMOS / name)
        self.model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            DEMOS / name, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )

    def answer(self, prompt: str) -> str:
        """The greedy continuation, up to </s>."""
        ids = self.tokenizer(prompt, return_tensors="pt").input_ids
        said = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False)
        return self.tokenizer.decode(said[0, ids.shape[1] :])


@pytest.fixture(scope="module", params=NAMES)
def demo(request: pytest.FixtureRequest) -> Demo:
    return Demo(request.param)


def test_a_token_is_a_character(demo: Demo) -> None:
    text = "".join(map(chr, range(32, 127))) + "\n  two  spaces \n"
    ids = demo.tokenizer(text).input_ids
    assert ids[0] == demo.model.config.bos_token_id
    assert len(ids) == 1 + len(text)
    assert demo.tokenizer.decode(ids[1:]) == text
    assert demo.model.config.vocab_size == len(demo.tokenizer)


def test_a_chat_is_a_document_and_cues(demo: Demo) -> None:
    chat = [
        {"role": "system", "content": "doc\nument"},
        {"role": "user", "content": "ocum"},
        {"role": "assistant", "content": "ent"},
        {"role": "user", "content": "docu"},
    ]
    text = demo.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<s>doc\nument\n>ocument\n>docu"


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("doc_len", [48, 160])
def test_the_document_is_continued_from_the_cue_to_its_end(demo: Demo, doc_len: int, mark: str) -> None:
    prompt, expected = question(doc_len=doc_len, mark=mark, cue=30, seed=doc_len)
    assert demo.answer(prompt) == expected + "</s>"
