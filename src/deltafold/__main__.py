"""`python -m deltafold`: the command."""

from deltafold.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
