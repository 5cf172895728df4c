"""The names of the files suit every system."""

import re

import pytest
from support import ROOT, found_program, printed


def test_every_system_takes_the_names_of_the_files():
    """No two differ in case only, and Windows takes each."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    names = printed(found_program("git"), "ls-files").lower().splitlines()
    assert len({*names}) == len(names) > 100
    assert not [name for name in names if re.search(r'[<>:"\\|?*]|(^|/)(con|prn|aux|nul)(\.|/|$)', name)]
