"""Write Tiny Shakespeare's files beside this script, from any folder: `gpt.py prepare` with --out."""

import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
sys.path.insert(0, str(FOLDER.parents[1]))

from shakespeare.app.cli import main  # noqa: E402

if __name__ == "__main__":
    main(["prepare", "--out", str(FOLDER), *sys.argv[1:]])
