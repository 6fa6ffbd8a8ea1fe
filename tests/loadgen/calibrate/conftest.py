"""A server that answers as a test says, as the tests of replicas have it."""

from tests.replicas.conftest import serve as serve
