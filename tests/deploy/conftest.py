"""Simulated engines, as tests of the gateway have them."""

from ..gateway.conftest import start_engine

__all__ = ["start_engine"]
