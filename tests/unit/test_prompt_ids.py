"""Long prompts of token ids are read as the JSON parser reads them, whatever a body looks like."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from raycache.api import prompt_ids
from raycache.api.prompt_ids import CompletionReader
from raycache.api.schema import CompletionBody, parse_body, parse_json
from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError
from tests.oracle import tiny_tokenizers
from tests.unit.scripted import ScriptedEngine, over_asgi, run


@pytest.fixture(scope="module", autouse=True)
def short() -> Iterator[None]:
    """Lists of any length are read by numpy, a few numbers at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_ids, "_LEAST_BYTES", 0)
        patch.setattr(prompt_ids, "PIECE_BYTES", 12)
        yield


def read(body: bytes, *cuts: int) -> CompletionReader:
    """A reader of the body, which arrives in parts that end at `cuts`."""
    reader, start = CompletionReader(), 0
    for end in (*sorted(cuts), len(body)):
        reader.feed(body[start:end])
        start = end
    assert reader.num_bytes == len(body)
    return reader


def is_read_by_numpy(reader: CompletionReader) -> bool:
    return isinstance(reader.values()["prompt"], array)


def outcome(parse: Callable[[bytes], dict[str, Any]], body: bytes) -> object:
    try:
        values = parse(body)
    except RequestError as error:
        return str(error)
    return {name: value.tolist() if isinstance(value, array) else value for name, value in values.items()}


def same(body: bytes, *cuts: int) -> None:
    got, wanted = outcome(lambda body: read(body, *cuts).values(), body), outcome(parse_json, body)
    assert got == wanted
    assert json.dumps(got) == json.dumps(wanted), "1 and True and 1.0 are equal; so are other orders"


_NUMBERS = st.one_of(
    st.integers(0, 200_000).map(str),
    st.integers(-(10**12), 10**12).map(str),
    st.sampled_from(["0", "00", "07", "-0", "9999999", "10000000", "1e3", "1.0", "1 2", "", "true", '"1"', "[1]", "٣"]),
)
_IDS = st.lists(st.integers(0, 9_999_999).map(str), min_size=1, max_size=20)
_ANY_IDS = st.lists(_NUMBERS, max_size=20)
_CUTS = st.lists(st.integers(0, 120), max_size=6)
_SEPARATORS = st.sampled_from([",", ", ", " , ", ",\n", ",,", " "])
_BEFORE = ['{"prompt"', '{"model": "m", "prompt"', '{"prompt": [5, 6], "prompt"', r'{"a\"prompt"', r'{"pr\u006fmpt"']
_BEFORE += [
    '{"a": {"prompt"',
    '[{"prompt"',
    '{"a": "\\"prompt\\": [1, 2]", "prompt"',
    '{"a":NaN,"prompt"',
    ' \n{"prompt"',
]
_BEHIND = [
    "}",
    ', "n": 1}',
    ', "prompt": [7]}',
    ', "prompt": "x"}',
    "}}",
    '}, "prompt": [8, 9]}',
    "}]",
    "",
    " } ",
    "]}",
]
_BEHIND += [', "a": "]"}', ', "n": }', ', "a": "\\ud800"}', ', "a": 1e999}']


@given(
    before=st.sampled_from(_BEFORE),
    colon=st.sampled_from([":", ": ", " :\n", "::", ""]),
    ids=_IDS | _ANY_IDS,
    separator=_SEPARATORS,
    around=st.sampled_from(["", " ", "\n ", ","]),
    behind=st.sampled_from(_BEHIND),
    cuts=_CUTS,
)
def test_bodies_are_read_as_by_the_parser(
    before: str, colon: str, ids: list[str], separator: str, around: str, behind: str, cuts: list[int]
) -> None:
    numbers = around + separator.join(ids) + around
    same(f"{before}{colon}[{numbers}]{behind}".encode(), *cuts)


@given(
    ids=st.lists(st.integers(0, 150_000), min_size=3, max_size=12),
    separators=st.sampled_from([(",", ":"), (", ", ": ")]),
    edits=st.lists(
        st.tuples(
            st.integers(0, 200),
            st.sampled_from(["insert", "delete", "replace"]),
            st.sampled_from(b'0,- []"\\:.e\n}\xff'),
        ),
        max_size=3,
    ),
    cuts=_CUTS,
)
@example(ids=[1, 2, 3], separators=(", ", ": "), edits=[], cuts=[])
def test_damaged_bodies_are_read_as_by_the_parser(
    ids: list[int], separators: tuple[str, str], edits: list[tuple[int, str, int]], cuts: list[int]
) -> None:
    whole = {"model": "m", "prompt": ids, "stop": ["]"], "max_tokens": 5}
    body = bytearray(json.dumps(whole, separators=separators).encode())
    for place, edit, char in edits:
        place %= len(body)
        body[place : place + (edit != "insert")] = b"" if edit == "delete" else bytes([char])
    same(bytes(body), *cuts)


@given(
    ids=st.lists(st.integers(0, 10**7 - 1), min_size=10, max_size=60),
    separator=st.sampled_from([",", ", "]),
    behind=st.sampled_from(["}", ', "stop": "]", "n": 2}']),
    cuts=st.lists(st.integers(11, 600), max_size=6),  # behind the bracket
)
def test_usual_lists_are_read_by_numpy_wherever_their_parts_end(
    ids: list[int], separator: str, behind: str, cuts: list[int]
) -> None:
    body = f'{{"prompt":[{separator.join(map(str, ids))}]{behind}'.encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompt_ids, "_LEAST_BYTES", 20)  # so that the first numbers tell how they are separated
        reader = read(body, *cuts)
        assert is_read_by_numpy(reader) == (len(separator.join(map(str, ids))) >= 20)
        assert list(reader.values()["prompt"]) == ids
    assert reader.num_text_bytes == (len(behind) + len('{"prompt":') if is_read_by_numpy(reader) else len(body))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b",",
        b"1,",
        b",1",
        b"1,,2",
        b"01",
        b"1,00",
        b"-1",
        b"12345678",
        b"1 2",
        b"1, 2,3",
        b"1,2, 3",
        b"1,  2",
        b" 1",
        b"a",
        b"1" * 100,
    ],
)
def test_anything_else_is_left_to_the_parser(text: bytes) -> None:
    body = b'{"prompt":[%b]}' % text
    reader = read(body)
    assert reader.num_text_bytes == len(body)
    same(body)


def test_a_long_prompt_is_an_array_in_the_checked_body() -> None:
    ids = list(range(1000, 9000))
    body = json.dumps({"model": "m", "prompt": ids, "n": 2}).encode()
    parsed = parse_body(CompletionBody, read(body, 3000, 3001, 20_000).values())
    (prompt,) = parsed.prompt
    assert isinstance(prompt, array) and prompt == array("i", ids) and parsed.n == 2


def test_a_server_takes_long_prompts_of_ids_as_short_ones(tmp_path: Path) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_level(tmp_path))

    async def test() -> None:
        engine = ScriptedEngine(tokenizer, context=20_000)
        ids = [number % 390 for number in range(15_000)]
        async with over_asgi(engine, tokenizer) as client:
            body = {"model": "tiny", "prompt": ids, "n": 2, "max_tokens": 2, "return_token_ids": True}
            found = (await client.post("/v1/completions", json=body)).json()
            assert found["usage"]["prompt_tokens"] == len(ids)
            assert [choice["prompt_token_ids"] for choice in found["choices"]] == [ids, ids]
            assert [list(request.prompt) for request in engine.requests] == [ids, ids]
            echoed = await client.post("/v1/completions", json=body | {"echo": True, "max_tokens": 1})
            assert echoed.json()["choices"][0]["text"].startswith(tokenizer.decode(ids[:50])[:20])
            wrong = await client.post("/v1/completions", json=body | {"prompt": [*ids, 400]})
            assert wrong.status_code == 400 and "token id 400" in wrong.json()["error"]["message"]
            long = await client.post("/v1/completions", json=body | {"prompt": ids * 2})
            assert long.status_code == 400 and "30000 tokens" in long.json()["error"]["message"]

    run(test())
