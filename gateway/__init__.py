"""The gateway: a reverse proxy that chooses a replica for each LLM request by the prompt prefix that it holds."""

__version__ = "0.1.0"
