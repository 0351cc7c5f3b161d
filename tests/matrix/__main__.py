"""`python -m tests.matrix`. Imports nothing before it has to: rank processes import this file again."""

if __name__ == "__main__":
    from tests.matrix.command import main

    raise SystemExit(main())
