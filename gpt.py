"""The command line's entry."""

from shakespeare.app.cli import main

if __name__ == "__main__":
    main()
