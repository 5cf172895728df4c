"""The command line's entry."""

from app.cli import main

if __name__ == "__main__":
    main()
