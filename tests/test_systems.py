"""The names of the files suit every system."""

import re

from support import printed


def test_every_system_takes_the_names_of_the_files():
    """No two differ in case only, and Windows takes each."""
    names = printed("git", "ls-files").lower().splitlines()
    assert len({*names}) == len(names) > 100
    assert not [name for name in names if re.search(r'[<>:"\\|?*]|(^|/)(con|prn|aux|nul)(\.|/|$)', name)]
