"""The process that checks grammars, with a check that fails as the grammar says: python broken_checks.py"""

from __future__ import annotations

import ctypes
import os
import signal
from pathlib import Path

from llguidance import LLTokenizer

from raycache.vocabulary.grammar_check import main, problem


def check(grammar: str, table: LLTokenizer) -> str:
    word, _, path = grammar.partition(" ")
    match word:
        case "segfault":
            ctypes.string_at(0)
        case "hang":
            ctypes.PyDLL(None).pause()  # with the interpreter's lock
        case "exhaust":
            bytearray(3 << 30)  # more than it may have
        case "read":  # wait until somebody has opened the pipe and closed it
            Path(path).read_text()
        case "count":
            with Path(path).open("a") as file:
                file.write(".")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "killed-once":
            with Path(path).open("a") as file:
                file.write(".")
            if Path(path).read_text() == ".":
                os.kill(os.getpid(), signal.SIGKILL)
        case "fine":
            pass
        case _:
            return problem(grammar, table)
    return ""


if __name__ == "__main__":
    main(check)
