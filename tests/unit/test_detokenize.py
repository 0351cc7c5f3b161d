"""Text out of tokens: incremental detokenisation, stop strings, and what a stream of increments gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from raycache.api.detokenize import Detokenizer
from raycache.api.output_text import OutputText, TextDelta
from raycache.api.stops import StopMatcher
from raycache.api.tokenizer import Tokenizer
from raycache.errors import CheckpointError
from raycache.types import FinishReason, RequestOutput, SamplingParams, TokenLogprob
from tests.oracle import tiny_tokenizers

_KINDS: dict[str, Callable[[Path], Path]] = {
    "byte_level": tiny_tokenizers.byte_level,
    "byte_fallback": tiny_tokenizers.byte_fallback,
    "metaspace": tiny_tokenizers.metaspace,
    "words": tiny_tokenizers.words,
}
_HARD_TEXT = st.text(
    st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from("aé東🎉👩‍👧́\u200d\ufffd ▁\n")), max_size=40
)


@pytest.fixture(scope="module", params=_KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _KINDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_level(tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(tiny_tokenizers.byte_fallback(tmp_path_factory.mktemp("byte_fallback")))


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, prompt: list[int] | None = None, skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt=prompt or [], skip_special_tokens=skip)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_joined_are_the_decoding_of_all(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    joined = "".join(pieces_of(tokenizer, ids, skip=skip))
    assert joined == tokenizer.decode(ids, skip_special_tokens=skip)
    wanted = reference.decode(ids, skip_special_tokens=skip)
    if "<0x00>" in reference.get_vocab():  # byte fallback: the reference gives up on a whole run of bytes at once
        joined, wanted = (re.sub("�+", "�", text) for text in (joined, wanted))
        if "�" in wanted:
            return
    assert joined == wanted


@settings(max_examples=150, deadline=None)
@given(text=_HARD_TEXT)
def test_text_comes_back_without_replacement_characters(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = pieces_of(tokenizer, ids)
    wanted = reference.decode(ids)
    assert "".join(pieces) == wanted
    assert "".join(pieces).count("�") == wanted.count("�")


@settings(max_examples=100, deadline=None)
@given(text=_HARD_TEXT, data=st.data())
def test_an_output_completes_the_character_that_its_prompt_began(
    byte_level: Tokenizer, text: str, data: st.DataObject
) -> None:
    ids = byte_level.encode(text, add_special_tokens=False)
    cut = data.draw(st.integers(0, len(ids)))
    output = "".join(pieces_of(byte_level, ids[cut:], prompt=ids[:cut]))
    prompt_bytes = b"".join(byte_level.pieces[token_id] for token_id in ids[:cut])
    # Independent of any decoder: the text's own characters, from the first that is not complete in the prompt.
    complete = len(prompt_bytes.decode("utf-8", errors="ignore"))
    assert output == text[complete:]


def test_a_space_after_the_prompt_is_kept_and_one_at_the_start_is_not(byte_fallback: Tokenizer) -> None:
    ids = byte_fallback.encode("one two", add_special_tokens=False)
    assert "".join(pieces_of(byte_fallback, ids)) == "one two"
    assert "".join(pieces_of(byte_fallback, ids, prompt=[byte_fallback.bos_id or 0])) == "one two"
    assert "".join(pieces_of(byte_fallback, ids, prompt=ids)) == " one two"


def test_each_character_goes_out_with_its_last_byte(byte_level: Tokenizer) -> None:
    one_byte_each = [byte_level.token_id(char) or 0 for char in "ðŁİī"]  # the four bytes of 🎉
    assert pieces_of(byte_level, [*one_byte_each, one_byte_each[0]]) == ["", "", "", "🎉", "", "�"]


def test_decoders_that_mix_tokens_are_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer.from_file(str(tiny_tokenizers.words(tmp_path) / "tokenizer.json"))
    backend.decoder = tokenizers.decoders.CTC()
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="CTC"):
        Tokenizer(tmp_path)


def test_a_missing_or_damaged_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="download it"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b'{"model": ')
    with pytest.raises(CheckpointError, match="damaged"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_special_tokens_are_added_as_transformers_does(kind: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = _KINDS[kind](tmp_path)
    tokenizer, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in ("one two", "", "<s>Grüße 東京 🎉"):
        assert tokenizer.encode(text, add_special_tokens=True) == theirs.encode(text)
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)


def naive_cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """Look at every prefix, the shortest first."""
    for end in range(len(text) + 1):
        ended = [stop for stop in stops if text[:end].endswith(stop)]
        if ended:
            return text[: end - max(map(len, ended))], True
    return text, False


@settings(max_examples=400, deadline=None)
@given(
    parts=st.lists(st.text("ab.", max_size=4), max_size=12),
    stops=st.lists(st.text("ab.", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_cut_the_same_however_the_text_is_split(parts: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    given_out, stopped = "", False
    for number, part in enumerate(parts):
        text, stopped = matcher.feed(part)
        given_out += text
        if stopped:
            break
        so_far = "".join(parts[: number + 1])
        held = so_far[len(given_out) :]
        assert given_out + held == so_far
        # Held back is exactly what may still become a stop string.
        assert held == max(
            (p for s in stops for n in range(len(s)) if so_far.endswith(p := s[:n])), key=len, default=""
        )
    if not stopped:
        given_out += matcher.flush()
    assert (given_out, stopped) == naive_cut("".join(parts), stops)


def push_all(
    output: OutputText, ids: list[int], *, reason: FinishReason | None = None, size: int = 1
) -> list[TextDelta]:
    deltas = []
    for start in range(0, len(ids), size):
        last = start + size >= len(ids)
        chunk = tuple(ids[start : start + size])
        logprobs = tuple(TokenLogprob(token_id, -1.0) for token_id in chunk)
        deltas.append(output.push(RequestOutput("r", chunk, logprobs=logprobs, finish_reason=reason if last else None)))
        if deltas[-1].finish_reason:
            break
    return deltas


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_string_ends_the_text_and_counts_tokens_up_to_its_last(byte_level: Tokenizer, size: int) -> None:
    ids = byte_level.encode("one two three STOP four five", add_special_tokens=False)
    through_stop = byte_level.encode("one two three STOP", add_special_tokens=False)
    output = OutputText(byte_level, prompt=[5], sampling=SamplingParams(stop=("STOP", "XYZ")))
    deltas = push_all(output, ids, size=size)
    assert "".join(delta.text for delta in deltas) == "one two three "
    assert deltas[-1].finish_reason is FinishReason.STOP
    assert [t for delta in deltas for t in delta.token_ids] == through_stop
    assert output.num_tokens == len(through_stop) == sum(len(delta.entries) for delta in deltas)
    with pytest.raises(ValueError, match="has ended"):
        output.push(RequestOutput("r", (1,)))


def test_an_end_without_stop_string_gives_out_what_was_held_back(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("one ST", add_special_tokens=False)
    output = OutputText(byte_level, prompt=[5], sampling=SamplingParams(stop=("STOP",)))
    deltas = push_all(output, ids, reason=FinishReason.LENGTH)
    assert "".join(delta.text for delta in deltas) == "one ST"
    assert deltas[-1].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_stops_is_counted_and_gives_no_text(byte_level: Tokenizer, skip: bool) -> None:
    ids = byte_level.encode("one two", add_special_tokens=False)
    output = OutputText(byte_level, prompt=[5], sampling=SamplingParams(), skip_special_tokens=skip)
    deltas = push_all(output, [*ids, byte_level.eos_id or 0], reason=FinishReason.STOP)
    assert "".join(delta.text for delta in deltas) == "one two"
    assert output.num_tokens == len(ids) + 1


def test_offsets_count_characters_of_the_echoed_prompt_too(byte_level: Tokenizer) -> None:
    prompt = byte_level.encode("Köln is", add_special_tokens=False)
    ids = byte_level.encode(" naïve 🎉 now", add_special_tokens=False)
    output = OutputText(byte_level, prompt=prompt, sampling=SamplingParams(), echo=True)
    prompt_logprobs = (None, *(TokenLogprob(token_id, -2.0) for token_id in prompt[1:]))
    logprobs = tuple(TokenLogprob(token_id, -1.0) for token_id in ids)
    delta = output.push(
        RequestOutput(
            "r", tuple(ids), logprobs=logprobs, prompt_logprobs=prompt_logprobs, finish_reason=FinishReason.LENGTH
        )
    )
    assert delta.text == "Köln is naïve 🎉 now"
    assert [entry.token_id for entry in delta.entries] == prompt + ids
    assert delta.entries[0].logprob is None
    # The characters before a token are those complete in the bytes before it.
    for position, entry in enumerate(delta.entries):
        before = b"".join(byte_level.pieces[token_id] for token_id in (prompt + ids)[:position])
        assert entry.offset == len(before.decode("utf-8", errors="ignore"))
