"""The server that most tests call."""

from collections.abc import Iterator

import pytest
from serving import MODEL, Client, serving


@pytest.fixture(scope="module")
def client(extension) -> Iterator[Client]:
    from shakespeare.app.server import Settings

    with serving(Settings((MODEL,))) as made:
        yield made
