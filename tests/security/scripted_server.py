"""`python -m tests.security.scripted_server SETTINGS`: a server over a scripted engine, until its input ends."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from raycache.api.tokenizer import Tokenizer
from tests.oracle import tiny_tokenizers
from tests.security.fuzz import served

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(tiny_tokenizers.byte_level(Path(folder)))
        with served(tokenizer, **json.loads(sys.argv[1])) as endpoint:
            print(endpoint, flush=True)
            sys.stdin.read()
