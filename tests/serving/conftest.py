"""The fixture `serve` for all tests of servers."""

from tests.helpers.serving import serve_fixture

__all__ = ["serve_fixture"]
