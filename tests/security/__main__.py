"""`python -m tests.security`: what takes too long, or too much of a machine, for every change.

python -m tests.security                         all of it
python -m tests.security attack --count 1000     only thousands of bad clients, as many as the limit of files permits
python -m tests.security fuzz --examples 200     only requests that nobody meant
python -m tests.security scan                    only the port scan (needs root, ip and nmap)
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from raycache.api.tokenizer import Tokenizer
from tests.oracle import tiny_tokenizers
from tests.security import fuzz
from tests.security.attack import BEHAVIOURS, attack
from tests.security.scan import scan

_SERVER = {"max_connections": 4096, "header_timeout_s": 10.0}
_NEVER_READS = "never reads its streams"


def main() -> int:
    """Run what is asked for; 0 if all of it went well."""
    parser = argparse.ArgumentParser(prog="python -m tests.security", description=__doc__)
    parser.add_argument("what", nargs="*", metavar="WHAT", help="attack, fuzz, scan (default: all)")
    parser.add_argument("--count", type=int, default=10_000, help="bad clients (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each attack (default: %(default)s)")
    parser.add_argument("--examples", type=int, default=500, help="of each operation (default: %(default)s)")
    options = parser.parse_args()
    what = options.what or ["attack", "fuzz", "scan"]
    is_good = True
    if "attack" in what:
        is_good &= asyncio.run(_attacks(options.count, seconds=options.seconds))
    if "fuzz" in what:
        is_good &= _fuzz(options.examples)
    if "scan" in what:
        is_good &= scan()
    return 0 if is_good else 1


async def _attacks(count: int, *, seconds: float) -> bool:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    count = min(count, hard - 512)
    quiet = await attack(BEHAVIOURS[0], count=0, seconds=seconds, settings=_SERVER)
    print(f"no bad clients: {quiet}", flush=True)
    is_good = not quiet.failures
    for behaviour in BEHAVIOURS:
        # Streams that run are requests as good as any; what is bounded is what they hold.
        bad = min(count, 500) if behaviour.name == _NEVER_READS else count
        outcome = await attack(behaviour, count=bad, seconds=seconds, settings=_SERVER)
        print(f"{behaviour.name}: {outcome}", flush=True)
        for text, times in Counter(outcome.failures).items():
            print(f"    {times} x {text}")
        is_good &= bool(outcome.seconds) and len(outcome.failures) <= len(outcome.seconds) // 100
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return is_good


def _fuzz(examples: int) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = Tokenizer(tiny_tokenizers.byte_level(Path(folder)))
        with fuzz.served(tokenizer) as endpoint:
            began_s = time.monotonic()
            counts = fuzz.fuzz_described(endpoint, examples=examples)
            counts += fuzz.fuzz_bytes(endpoint, examples=examples * 5)
    by_status: Counter[int] = Counter()
    for (_, status), number in counts.items():
        by_status[status] += number
    answers = ", ".join(f"{number} x {status}" for status, number in sorted(by_status.items()))
    print(f"fuzzed: {sum(counts.values())} requests in {time.monotonic() - began_s:.0f} s: {answers}", flush=True)
    return all(status < 500 for status in by_status)


if __name__ == "__main__":
    sys.exit(main())
