"""The command line, as python -m shakespeare."""

from shakespeare.app.cli import main

if __name__ == "__main__":
    main()
