"""A client, run in a lab: python -m tests.lab.ask ENDPOINT PROMPT COUNT, with a prompt of token ids as JSON."""

from __future__ import annotations

import json
import os
import sys

import openai


def main() -> None:
    endpoint, prompt, count = sys.argv[1:]
    client = openai.OpenAI(
        base_url=endpoint, api_key=os.environ.get("RAYCACHE_API_KEY", "none"), max_retries=0, timeout=60
    )
    [model] = client.models.list().data
    answer = client.completions.create(
        model=model.id,
        prompt=json.loads(prompt),
        max_tokens=int(count),
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    tokens = answer.choices[0].model_dump()["token_ids"]
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    print(json.dumps({"tokens": tokens, "cached": answer.usage.prompt_tokens_details.model_dump()}))


if __name__ == "__main__":
    main()
