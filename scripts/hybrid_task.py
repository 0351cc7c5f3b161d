"""What the hybrid models of demos/hybrids/ learn: to continue a document from a cue.

    <s> DOCUMENT > CUE ANSWER        DOCUMENT: random characters in lines; CUE: four characters in a row of it;
                                     ANSWER: what follows the cue, to the end of the document, then </s>

Nothing but the context can tell, so answers are long, sharp and checkable by eye. With one twist: the marks ^ _ = say
how answers are written from there on: in capitals, in small letters, as they stand. The text must come from far back,
which attention is good at; the last mark is one fact about all that was read, which a recurrent state is good at. So a
cache that loses either one gives another answer.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

# Shapes in this file: B sequences, T tokens, L tokens of a document, Q questions.

SPECIAL = ["<s>", "</s>", "<pad>", "<unk>"]
BOS, EOS, PAD = 0, 1, 2
CHARS = "\n" + "".join(map(chr, range(32, 127)))
VOCAB_SIZE = len(SPECIAL) + len(CHARS)
UPPER, LOWER, AS_IS, ASK = "^", "_", "=", ">"
CUE_LEN = 4
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}>{% endif %}"
    "{{ message.content }}{% if message.role != 'user' %}{{ '\\n' }}{% endif %}{% endfor %}"
)


class Task:
    """Documents and questions, drawn on a device.

    Args:
        device: where batches are made.
        seed: of the draws.

    Attributes:
        num_marks: per document, on average.
    """

    def __init__(self, device: torch.device, *, seed: int) -> None:
        self.num_marks = 2.0
        self._generator = torch.Generator(device).manual_seed(seed)
        self._device = device
        plain = [char for char in CHARS if char not in (UPPER, LOWER, AS_IS, ASK, "\n")]
        self._plain = self._table(plain)
        self._marks = self._table([UPPER, LOWER, AS_IS])
        # [3, V]: how a token is written after each of the marks.
        same = torch.arange(VOCAB_SIZE, device=device)
        upper, lower = same.clone(), same.clone()
        upper[len(SPECIAL) :] = self._table([char.upper() for char in CHARS])
        lower[len(SPECIAL) :] = self._table([char.lower() for char in CHARS])
        self._written = torch.stack([upper, lower, same])

    def batch(self, size: int, *, doc_len: int, num_questions: int, answer_len: int) -> tuple[Tensor, Tensor]:
        """Draw sequences of one document and several questions about parts of it that do not overlap.

        Args:
            size: B.
            doc_len: L; at least num_questions * (CUE_LEN + answer_len) - 1.
            num_questions: Q.
            answer_len: tokens of each answer; half of the last answers reach the end of the document and say </s>.
        Returns:
            (tokens, labels), both [B, T] int64. A label is the token itself where the context determines it (in
            answers), elsewhere -100.
        """
        doc = self._documents(size, doc_len)
        span = CUE_LEN + answer_len
        starts = self._starts(size, doc_len=doc_len, num_questions=num_questions, span=span)
        index = starts[..., None] + torch.arange(span, device=self._device)  # [B, Q, span]
        ended = F.pad(doc, (0, 1), value=EOS)
        asked = ended.gather(1, index.flatten(1)).view(size, num_questions, span)
        ask, line = self._id(ASK), self._id("\n")
        questions = F.pad(F.pad(asked, (1, 0), value=ask), (0, 1), value=line)  # [B, Q, 1 + span + 1]
        raw = torch.cat([F.pad(doc, (1, 0), value=BOS), questions.flatten(1)], dim=1)[:, :-1]
        is_answer = torch.zeros(span + 2, dtype=torch.bool, device=self._device)
        is_answer[1 + CUE_LEN : 1 + span] = True
        is_answer = F.pad(is_answer.repeat(num_questions), (1 + doc_len, 0))[:-1]
        tokens = torch.where(is_answer, self._write(raw), raw)
        return tokens, torch.where(is_answer, tokens, -100)

    def _documents(self, size: int, doc_len: int) -> Tensor:
        """[B, L]: lines of 20 characters on average."""
        doc = self._plain[self._below(len(self._plain), size, doc_len)]
        doc = doc.where(self._chance(size, doc_len) > 1 / 20, self._id("\n"))
        doc = doc.where(
            self._chance(size, doc_len) > self.num_marks / doc_len, self._marks[self._below(3, size, doc_len)]
        )
        doc[:, -1] = self._id("\n")
        return doc

    def _starts(self, size: int, *, doc_len: int, num_questions: int, span: int) -> Tensor:
        """[B, Q]: where the questions' cues begin, one per equal part of the document, in random order."""
        part = doc_len // num_questions
        slack = self._below(part - span + 1, size, num_questions)
        starts = torch.arange(num_questions, device=self._device) * part + slack
        order = self._chance(size, num_questions)
        reaches_end = self._chance(size) < 0.5
        starts[:, -1] = torch.where(reaches_end, doc_len + 1 - span, starts[:, -1])
        order[:, -1] = torch.where(reaches_end, 2.0, order[:, -1])  # nothing follows </s>
        return starts.gather(1, order.argsort(1))

    def _write(self, raw: Tensor) -> Tensor:
        """Every token as the last mark before it wants it."""
        mode = torch.full_like(raw, 2)
        place = torch.arange(raw.shape[1], device=self._device).expand_as(raw)
        is_mark = torch.isin(raw, self._marks)
        last = torch.where(is_mark, place, -1).cummax(1).values
        last = F.pad(last[:, :-1], (1, 0), value=-1)  # a mark speaks of what comes after it
        mark = raw.gather(1, last.clamp(min=0))
        for number, token in enumerate(self._marks):
            mode = torch.where((last >= 0) & (mark == token), number, mode)
        return self._written[mode, raw]

    def _table(self, chars: list[str]) -> Tensor:
        return torch.tensor([self._id(char) for char in chars], device=self._device)

    def _id(self, char: str) -> int:
        return len(SPECIAL) + CHARS.index(char)

    def _below(self, bound: int, *shape: int) -> Tensor:
        return torch.randint(bound, shape, generator=self._generator, device=self._device)

    def _chance(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self._generator, device=self._device)


def make_tokenizer() -> Tokenizer:
    """One token per printable ASCII character and line end: byte-level BPE without merges; the rest is <unk>."""
    spelled = [pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(char)[0][0] for char in CHARS]
    vocab = {token: token_id for token_id, token in enumerate(SPECIAL + spelled)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer
