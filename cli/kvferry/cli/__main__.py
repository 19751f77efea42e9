"""`python -m kvferry.cli`."""

from kvferry.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
