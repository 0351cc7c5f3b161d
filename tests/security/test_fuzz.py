"""No request makes the server fail. `python -m tests.security` draws many more."""

from __future__ import annotations

from raycache.api.tokenizer import Tokenizer
from tests.security.fuzz import fuzz_bytes, fuzz_described, served


def test_requests_drawn_from_the_description_get_described_answers(tokenizer: Tokenizer) -> None:
    with served(tokenizer) as endpoint:
        counts = fuzz_described(endpoint, examples=15)
    operations = {label for label, _ in counts}
    assert {
        "POST /v1/completions",
        "POST /v1/chat/completions",
        "POST /v1/messages",
        "GET /v1/models/{model}",
    } <= operations
    # Draws that are all refused would test the refusal only.
    assert counts["POST /v1/completions", 200] and counts["POST /v1/chat/completions", 200]
    assert counts["POST /v1/messages", 200] and counts["POST /v1/messages/count_tokens", 200]
    assert all(status < 500 for _, status in counts)


def test_bytes_that_are_nearly_json_get_an_answer(tokenizer: Tokenizer) -> None:
    with served(tokenizer) as endpoint:
        counts = fuzz_bytes(endpoint, examples=150)
    assert sum(counts.values()) >= 100
