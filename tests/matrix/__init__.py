"""The matrix: every family under every split and every kind of hit, against float64.

    python -m tests.matrix                 the whole table
    python -m tests.matrix --controls      damage to the cache must be noticed
    python -m tests.matrix --storages DIR --scenarios other_splits
                                           twice: the second time every split reads what every other one has stored
    python -m tests.matrix.drafting        every family with every kind of draft, by cp ranks

    sequences.py   prompts that share prefixes, their greedy answers and float64 logits
    ranks.py       a rank in a process: executes plans, answers with the logits of every position
    gang.py        those of one split; families are loaded one after the other
    trial.py       a real engine, scheduler and cache on top of it, whose sampling alone is forced
    scenarios.py   kinds of hits, the columns of the table
    home.py        host memory and a storage below a gang, and damage to them
    tiers.py       more columns: from which tier a prefix comes
    faults.py      the last ones: what goes wrong in the tiers
    streams.py     requests drawn at random
    contents.py    what ranks keep in their caches, against transformers'
    controls.py    damage to one part of one layer's cache, between two requests
    blind.py       the same behind or without the check of a load
    table.py       cells and how they are printed
    matrix.py      runs them; command.py is the command
    draft_cells.py draft tokens and outputs of pairs of a target and a draft; drafting.py is the command

Models are tiny; what they compute is compared at every position, and page balances are checked after every step.
"""

import os

# Before torch is imported, and inherited by ranks: tiny models are many times slower with more threads than free cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
