"""Random tokens under the grammars of JSON schemas, without a model: python -m benchmarks.structured_random DIR SCHEMAS

Takes and refuses schemas as the server does, and checks the texts with the package jsonschema.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

from benchmarks.structured import CLOSING, check, choose, keyword, read_schemas
from raycache.api import constraint
from raycache.api.tokenizer import Tokenizer
from raycache.errors import RequestError
from raycache.vocabulary.grammar_check import problem
from raycache.vocabulary.grammar_tokens import compiled, grammar_tokens

_END_SHARE, _CLOSING_SHARE = 0.5, 0.4


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.structured_random",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="directory with a tokenizer")
    parser.add_argument("schemas", type=Path, help="folder of .json files, or file with one per line")
    parser.add_argument("--sample", type=int, default=0, metavar="N", help="as many of each folder, N in all; 0: all")
    parser.add_argument("--seed", type=int, default=1, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=400, help="default: %(default)s")
    options = parser.parse_args()

    tokenizer = Tokenizer(options.model)
    size, eos_id = tokenizer.vocab_size, tokenizer.eos_id
    assert eos_id is not None, "the tokenizer names no end token"
    table = grammar_tokens(tokenizer.vocabulary, num_logits=size, eos_token_ids=[eos_id])
    closing = [number for text in CLOSING if (number := tokenizer.token_id(text)) is not None]
    drawn, outcomes, refused = random.Random(options.seed), Counter[str](), Counter[str]()
    for name, schema in choose(read_schemas(options.schemas), options.sample, seed=options.seed).items():
        try:
            grammar = constraint.json_schema(schema)
            refusal = problem(grammar, table)
        except RequestError as error:
            refusal = str(error)
        if refusal:
            refused[keyword(refusal)] += 1
            continue
        ids = _draw(grammar, table, closing=closing, eos_id=eos_id, drawn=drawn, max_tokens=options.max_tokens)
        text = None if ids is None else tokenizer.decode(ids, skip_special_tokens=False)
        outcome, detail = ("cut", "") if text is None else check(text, schema)
        outcomes[outcome] += 1
        if detail:
            print(f"{outcome}: {name}: {detail}: {text!r}")
    print(json.dumps({"outcomes": outcomes, "refused": refused.total(), "refused_by": dict(refused.most_common())}))
    return 1 if outcomes["invalid"] else 0


def _draw(grammar: str, table: LLTokenizer, *, max_tokens: int, eos_id: int, **how: Any) -> list[int] | None:
    """Random tokens up to the end, more often than not those that close something; None if there is no end in time."""
    matcher, mask, drawn = compiled(grammar, table), allocate_token_bitmask(1, table.vocab_size), how["drawn"]
    ids: list[int] = []
    for _ in range(max_tokens):
        fill_next_token_bitmask(matcher, mask, 0)
        assert not matcher.is_error(), matcher.get_error()
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")
        closing = [number for number in how["closing"] if bits[number]]
        if bits[eos_id] and drawn.random() < _END_SHARE:
            return ids
        allowed = closing if closing and drawn.random() < _CLOSING_SHARE else np.flatnonzero(bits)
        token_id = int(drawn.choice(allowed))
        if token_id == eos_id:
            return ids
        matcher.consume_token(token_id)
        ids.append(token_id)
    return None


if __name__ == "__main__":
    sys.exit(main())
