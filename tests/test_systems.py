"""The names of the files suit every system, and one without links says what to do."""

import re
import runpy
import shutil

import pytest
from support import ROOT, found_program, printed


def test_every_system_takes_the_names_of_the_files():
    """No two differ in case only, and Windows takes each."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout")
    names = printed(found_program("git"), "ls-files").lower().splitlines()
    assert len({*names}) == len(names) > 100
    assert not [name for name in names if re.search(r'[<>:"\\|?*]|(^|/)(con|prn|aux|nul)(\.|/|$)', name)]


def test_a_checkout_whose_links_are_text_files_says_what_to_do(tmp_path):
    made = shutil.copy(ROOT / "shakespeare" / "__init__.py", tmp_path)
    (tmp_path / "model").write_text("../model")
    with pytest.raises(ImportError, match="run: git config core.symlinks true && git checkout") as error:
        runpy.run_path(made)
    assert "\n" not in str(error.value)
